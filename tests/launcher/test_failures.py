"""Failures without progress are numbered; progress resets the number."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoint.checkpoint_dir import verify_checkpoint
from launcher.failures import MOST_ATTEMPTS, record_end, record_failure
from runtime import exit_codes
from runtime.run_folder import list_checkpoints
from tests.lib.patience import PATIENCE_SECONDS
from tests.lib.repository import ROOT
from tests.lib.saved import write_checkpoint
from tools import rollback
from tools.rollback import roll_back
from tools.slurm_end import count_requeue


def fail(control: Path) -> int:
    return record_failure(
        control, lines=["rank 1 was killed by SIGKILL", "rank 0: waits"], codes={0: 1, 1: -9}
    )


def test_failures_without_progress_are_numbered(tmp_path: Path) -> None:
    control = tmp_path / "run" / "control"
    assert [fail(control) for _ in range(MOST_ATTEMPTS)] == [1, 2, 3]
    # Whoever restarts after the last attempt has fixed something, so the count starts at one.
    assert fail(control) == 1
    record = json.loads((control / "failures").read_text().splitlines()[-1])
    assert record["reason"] == "rank 1 was killed by SIGKILL"
    assert record["exit_codes"] == {"0": 1, "1": -9}
    assert control.stat().st_mode & 0o077 == 0


def test_newer_checkpoint_resets_attempts(tmp_path: Path) -> None:
    numbers = []
    for step in (10, 10, 20, 20, 20):
        (tmp_path / "progress").write_text(f"{step}\n")
        numbers.append(fail(tmp_path))
    assert numbers == [1, 2, 1, 2, 3]


def test_older_checkpoint_is_no_progress(tmp_path: Path) -> None:
    (tmp_path / "progress").write_text("20\n")
    fail(tmp_path)
    (tmp_path / "progress").write_text("10\n")
    assert fail(tmp_path) == 2


def test_progress_after_a_rollback_counts(tmp_path: Path) -> None:
    control, checkpoints = tmp_path / "control", tmp_path / "checkpoints"
    for step in (500, 1000):
        write_checkpoint(checkpoints / f"step-{step:08d}", step=step)
    assert [fail(control), fail(control)] == [1, 2]
    assert [count_requeue(control), count_requeue(control)] == [1, 2]
    (control / "lock").touch()
    roll_back(tmp_path, 500)
    # Less than before the rollback.
    (checkpoints / "step-00000700").mkdir()
    assert [fail(control), fail(control)] == [1, 2]
    assert [count_requeue(control), count_requeue(control)] == [1, 2]


def test_checkpoint_that_is_saved_meanwhile_is_abandoned_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "control").mkdir()
    (tmp_path / "control" / "lock").touch()
    for step in (10, 20):
        write_checkpoint(tmp_path / "checkpoints" / f"step-{step:08d}", step=step)

    def verify(folder: Path) -> list[str]:
        """A short run trains and saves while the rollback reads."""
        write_checkpoint(tmp_path / "checkpoints" / "step-00000025", step=25)
        return verify_checkpoint(folder)

    monkeypatch.setattr(rollback, "verify_checkpoint", verify)
    roll_back(tmp_path, 10)
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000010"]


@pytest.mark.parametrize("outcome", ["done", "stopped SIGTERM"])
def test_requested_end_resets_attempts(tmp_path: Path, outcome: str) -> None:
    record_end(tmp_path, outcome)
    assert not (tmp_path / "failures").exists()
    fail(tmp_path)
    record_end(tmp_path, outcome)
    record_end(tmp_path, outcome)
    assert len((tmp_path / "failures").read_text().splitlines()) == 2
    assert fail(tmp_path) == 1


def test_truncated_line_restarts_the_count(tmp_path: Path) -> None:
    fail(tmp_path)
    path = tmp_path / "failures"
    path.write_text(path.read_text()[:20])
    assert [fail(tmp_path) for _ in range(4)] == [1, 2, 3, 1]


def test_failure_is_recorded_without_a_terminal(tmp_path: Path) -> None:
    terminal, other_end = pty.openpty()
    os.close(terminal)
    code = (
        "import sys; from pathlib import Path; from launcher.launch import End, report_failure;"
        "end = End({0: 1}, '', None, None); sys.exit(report_failure(end, Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, stdout=other_end, stderr=other_end, timeout=PATIENCE_SECONDS
    )
    os.close(other_end)
    assert done.returncode == exit_codes.FAILED
    assert "exit codes by rank: {0: 1}" in (tmp_path / "failures").read_text()
