"""Requeue decisions from the control folder, without Slurm."""

import json
from pathlib import Path

import pytest

from launcher.failures import MOST_ATTEMPTS, record_failure
from runtime import exit_codes
from runtime.exit_codes import BAD_CONFIG, DO_NOT_REQUEUE, DONE, FAILED, PREEMPTED
from runtime.run_folder import OLD_STOP, stop_file_id
from tools.slurm_end import MOST_REQUEUES, decide, main

SOME_SIGNAL = -9


def write_outcome(folder: Path, code: int | None, outcome: str = "") -> Path:
    control = folder / "control"
    control.mkdir(exist_ok=True)
    exit_codes.write_exit_code(control, 0 if code is None else code)
    if code is None:
        exit_codes.clear_exit_code(control)
    (control / "outcome").write_text(f"{outcome}\n")
    return control


@pytest.mark.parametrize("is_warned", [False, True])
@pytest.mark.parametrize(
    ("code", "outcome", "decision"),
    [
        (DONE, "done", DONE),
        (DONE, "stopped stop file", DONE),
        (BAD_CONFIG, "", BAD_CONFIG),
        (DO_NOT_REQUEUE, "", DO_NOT_REQUEUE),
        (PREEMPTED, "stopped SIGUSR1", PREEMPTED),
        (FAILED, "", PREEMPTED),
        (SOME_SIGNAL, "", PREEMPTED),
        (None, "", PREEMPTED),
    ],
)
def test_decision_by_exit_code(
    code: int | None, outcome: str, decision: int, is_warned: bool, tmp_path: Path
):
    found, reason = decide(write_outcome(tmp_path, code, outcome), is_warned=is_warned)
    assert found == decision
    assert reason


@pytest.mark.parametrize(
    ("code", "decision"),
    [(PREEMPTED, DONE), (FAILED, FAILED), (None, FAILED), (BAD_CONFIG, BAD_CONFIG)],
)
def test_stop_file_prevents_requeue(code: int | None, decision: int, tmp_path: Path):
    control = write_outcome(tmp_path, code)
    (control / "stop").touch()
    assert decide(control, is_warned=True)[0] == decision


def test_stop_file_of_an_earlier_job_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of a start whose ranks were killed before they locked the run."""
    control = write_outcome(tmp_path, PREEMPTED)
    (control / "stop").touch()
    monkeypatch.setenv(OLD_STOP, stop_file_id(control))
    assert decide(control, is_warned=False)[0] == PREEMPTED
    assert not (control / "stop").exists(), "a restart obeys what it finds"


@pytest.mark.parametrize(("code", "is_warned"), [(None, False), (None, True), (FAILED, True)])
def test_uncounted_failures_are_bounded(code: int | None, is_warned: bool, tmp_path: Path):
    control = write_outcome(tmp_path, code)
    found = [decide(control, is_warned=is_warned)[0] for _ in range(MOST_ATTEMPTS)]
    assert found == [PREEMPTED] * (MOST_ATTEMPTS - 1) + [DO_NOT_REQUEUE]


def test_signal_before_the_launcher_handles_it_is_no_failure(tmp_path: Path):
    control = write_outcome(tmp_path, None)
    for _ in range(MOST_REQUEUES):
        code, reason = decide(control, is_warned=True, is_cut_off=True)
        assert (code, reason) == (PREEMPTED, "stopped by a signal; newest checkpoint: none")
        # As the next start does.
        (control / "exit_code").unlink()
    assert not (control / "failures").exists()
    assert decide(control, is_warned=True, is_cut_off=True)[0] == DO_NOT_REQUEUE


def test_rejected_job_writes_nothing_to_the_run_of_another(tmp_path: Path):
    control = write_outcome(tmp_path, None)
    (control / "stop").touch()
    before = sorted(path.name for path in control.iterdir())
    assert decide(control, is_warned=False, is_rejected=True)[0] == BAD_CONFIG
    assert sorted(path.name for path in control.iterdir()) == before
    # A launcher that locked the run wrote why it ended.
    (control / "stop").unlink()
    write_outcome(tmp_path, PREEMPTED)
    assert decide(control, is_warned=False, is_rejected=True)[0] == PREEMPTED


def test_counted_failure_is_not_counted_again(tmp_path: Path):
    control = write_outcome(tmp_path, FAILED)
    assert record_failure(control, lines=["it broke"], codes={0: 1}) == 1
    assert decide(control, is_warned=False)[0] == PREEMPTED
    assert record_failure(control, lines=["it broke"], codes={0: 1}) == 2


def test_decision_names_the_newest_checkpoint(tmp_path: Path):
    control = write_outcome(tmp_path, PREEMPTED)
    (tmp_path / "checkpoints" / "step-00000040").mkdir(parents=True)
    _, reason = decide(control, is_warned=True)
    assert reason == "stopped by a signal; newest checkpoint: step 40"


def test_requeues_are_bounded_until_progress(tmp_path: Path):
    control = write_outcome(tmp_path, PREEMPTED, "stopped SIGTERM")
    for step in (0, 4):
        (control / "progress").write_text(f"{step}\n")
        found = [decide(control, is_warned=False)[0] for _ in range(MOST_REQUEUES)]
        assert set(found) == {PREEMPTED}
    for _ in range(2):
        assert decide(control, is_warned=False)[0] == DO_NOT_REQUEUE
    count = {"count": MOST_REQUEUES, "progress": 4}
    assert json.loads((control / "requeues").read_text()) == count


def test_run_that_never_started_is_requeued(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(tmp_path / "run")]) == PREEMPTED
    assert capsys.readouterr().out.startswith("requeue: ")


@pytest.mark.parametrize(
    ("code", "arguments", "message"),
    [
        (DONE, [], "stop: stopped by the stop file"),
        (BAD_CONFIG, [], "stop: this start was rejected, see above"),
        (DO_NOT_REQUEUE, [], "stop: a requeue would fail again; shardloom status says why"),
        (PREEMPTED, ["warned"], "requeue: stopped by a signal; newest checkpoint: none\n"),
        (FAILED, [], "requeue: the launcher exited with 1\n"),
        (FAILED, ["warned"], "requeue: the launcher exited with 1, after Slurm's warning"),
        (None, [], "requeue: the launcher of node 0 was killed"),
    ],
)
def test_decision_is_printed(
    code: int | None,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    write_outcome(tmp_path, code, "stopped stop file")
    main([str(tmp_path), *arguments])
    assert capsys.readouterr().out.startswith(message)


@pytest.mark.parametrize("arguments", [[], ["run", "warnt"]])
def test_bad_arguments_are_rejected(arguments: list[str]):
    assert main(arguments) == BAD_CONFIG
