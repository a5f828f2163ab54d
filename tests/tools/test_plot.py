"""Plot of a run's losses."""

import json
from pathlib import Path

import pytest

from runtime import exit_codes
from tools import plot


def test_losses_are_plotted(tmp_path: Path) -> None:
    log, picture = tmp_path / "metrics.jsonl", tmp_path / "loss.png"
    records = [{"step": step, "loss": 5.0 / step} for step in (1, 2, 3)]
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert plot.main([str(tmp_path), str(picture)]) == exit_codes.DONE
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_errors_name_file_or_argument(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "lo')
    for arguments, message in (
        ([], "required: run_folder, picture"),
        ([str(tmp_path / "none"), "x.png"], "none/metrics.jsonl"),
        ([str(tmp_path), "x.png"], "metrics.jsonl: Unterminated string"),
    ):
        assert plot.main(arguments) == exit_codes.BAD_CONFIG
        assert message in capsys.readouterr().err
