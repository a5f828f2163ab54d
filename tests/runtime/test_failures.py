"""Failures without progress are numbered; whatever shows that the run goes on starts anew."""

import json
from pathlib import Path

import pytest

from runtime.failures import MOST_ATTEMPTS, record_end, record_failure


def fail(control: Path) -> int:
    return record_failure(
        control, lines=["rank 1 was ended by SIGKILL", "rank 0: waits"], codes={0: 1, 1: -9}
    )


def test_attempts_without_progress_are_numbered(tmp_path: Path) -> None:
    control = tmp_path / "run" / "control"
    assert [fail(control) for _ in range(MOST_ATTEMPTS)] == [1, 2, 3]
    # Who starts it again after the last one has mended something, so these count from one.
    assert fail(control) == 1
    told = json.loads((control / "failures").read_text().splitlines()[-1])
    assert told["reason"] == "rank 1 was ended by SIGKILL"
    assert told["exit_codes"] == {"0": 1, "1": -9}
    assert control.stat().st_mode & 0o077 == 0


def test_a_newer_checkpoint_starts_anew(tmp_path: Path) -> None:
    numbers = []
    for step in (10, 10, 20, 20, 20):
        (tmp_path / "progress").write_text(f"{step}\n")
        numbers.append(fail(tmp_path))
    assert numbers == [1, 2, 1, 2, 3]


def test_a_run_that_was_rolled_back_has_no_progress(tmp_path: Path) -> None:
    (tmp_path / "progress").write_text("20\n")
    fail(tmp_path)
    (tmp_path / "progress").write_text("10\n")
    assert fail(tmp_path) == 2


@pytest.mark.parametrize("outcome", ["done", "stopped SIGTERM"])
def test_an_end_as_asked_starts_anew(tmp_path: Path, outcome: str) -> None:
    record_end(tmp_path, outcome)
    assert not (tmp_path / "failures").exists()
    fail(tmp_path)
    record_end(tmp_path, outcome)
    record_end(tmp_path, outcome)
    assert len((tmp_path / "failures").read_text().splitlines()) == 2
    assert fail(tmp_path) == 1


def test_a_line_that_was_cut_off_only_delays_the_count(tmp_path: Path) -> None:
    fail(tmp_path)
    path = tmp_path / "failures"
    path.write_text(path.read_text()[:20])
    assert [fail(tmp_path) for _ in range(4)] == [1, 1, 2, 3]
