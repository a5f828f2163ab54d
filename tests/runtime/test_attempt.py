"""A start is recorded; what goes wrong with that is a warning, and the run goes on."""

import errno
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime import attempt, provenance
from runtime.attempt import AttemptRecorder
from runtime.git import GitError, WorkingTree
from runtime.provenance import attempt_numbers, path_of, read_attempt

FACTS = {"Python": "CPython 3.11.7", "package numpy": "2.0.0", "file train.py": "abc"}


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(attempt.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(attempt, "gather_to_rank0", lambda function: [function()])
    tree = WorkingTree("0123456789ab", "main", ["train.py"], [], "+api_key = 'abcdefgh'\n")
    monkeypatch.setattr(attempt, "read_working_tree", lambda root: tree)


def record(folder: Path, resumed_step: int | None = None) -> None:
    AttemptRecorder(folder, "[training]\nsteps = 1\n", FACTS).finish(resumed_step)


def test_restarts_add_one_small_file(
    tmp_path: Path, captured_log: pytest.LogCaptureFixture
) -> None:
    for step in (None, 3, 3, 7):
        record(tmp_path, step)
    folder = tmp_path / "provenance"
    assert [read_attempt(folder, n).resumed_from for n in attempt_numbers(folder)] == [
        None,
        3,
        3,
        7,
    ]
    assert len(list(folder.iterdir())) == 4 + 3
    (diff,) = folder.glob("diff-*")
    assert diff.read_text() == "+api_key = ***\n"
    assert captured_log.messages == []
    path_of(folder, 2).unlink()
    record(tmp_path)
    assert attempt_numbers(folder) == [1, 3, 4, 5]


def raising(error: Exception) -> Callable[..., None]:
    def function(*arguments: object) -> None:
        raise error

    return function


def test_failures_are_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, captured_log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attempt, "describe_machine", raising(RuntimeError("driver")))
    monkeypatch.setattr(attempt, "read_working_tree", raising(GitError("dubious ownership")))
    record(tmp_path)
    found = read_attempt(tmp_path / "provenance", 1)
    assert found.nodes[0].machine == {"problem": "driver"}
    assert (found.commit, found.git_problem) == ("", "dubious ownership")
    assert "provenance: no commit is recorded: dubious ownership" in captured_log.text

    path_of(tmp_path / "provenance", 1).write_text("{")
    record(tmp_path)
    assert "not compared" in captured_log.messages[-1]
    assert "attempt-00001.json" in captured_log.messages[-1]

    full = raising(OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(provenance, "atomic_write_text", full)
    record(tmp_path)
    assert "not recorded: OSError" in captured_log.messages[-1]
    assert attempt_numbers(tmp_path / "provenance") == [1, 2]

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "provenance").symlink_to(tmp_path / "provenance")
    record(tmp_path / "other")
    assert "symbolic link" in captured_log.messages[-1]


def test_git_that_hangs_does_not_hold_up_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, captured_log: pytest.LogCaptureFixture
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(attempt, "SECONDS", 0.01)
    monkeypatch.setattr(attempt, "read_working_tree", lambda root: answers.wait(60) and None)
    recorder = AttemptRecorder(tmp_path, "", FACTS)
    recorder.finish(5)
    assert "not collected" in captured_log.messages[-1]
    answers.set()
    assert recorder._thread is not None
    recorder._thread.join()
    # It is still recorded.
    assert attempt_numbers(tmp_path / "provenance") == [1]
