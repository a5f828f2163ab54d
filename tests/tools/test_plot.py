"""Plot of a run's losses."""

import json
from pathlib import Path

import pytest

from runtime import exit_codes
from tools import plot


def test_losses_are_plotted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, picture = tmp_path / "metrics.jsonl", tmp_path / "loss.png"
    records = [{"step": step, "loss": 5.0 / step} for step in (1, 2, 3)]
    lines = [json.dumps(record).encode() for record in (*records, {"step": 4, "loss": None})]
    log.write_bytes(b"\n".join([*lines, b"\xff", b'{"step": 5, "lo']))
    assert plot.main([str(tmp_path), str(picture)]) == exit_codes.DONE
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().err == f"problem: {log}:5: torn line (2 in all)\n"


def test_errors_name_file_or_argument(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "lo')
    for arguments, message in (
        ([], "required: run_folder, picture"),
        ([str(tmp_path / "none"), "x.png"], "none/metrics.jsonl"),
        ([str(tmp_path), "x.png"], "metrics.jsonl: no line of metrics"),
    ):
        assert plot.main(arguments) == exit_codes.BAD_CONFIG
        assert message in capsys.readouterr().err
