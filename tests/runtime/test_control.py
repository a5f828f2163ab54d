"""Stop requests reach all ranks at the same step, and one process at a time locks a run."""

import errno
import os
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from config import ConfigError
from runtime import control
from runtime.control import RunControl
from runtime.exit_codes import (
    BAD_CONFIG,
    DONE,
    FAILED,
    PREEMPTED,
    STOP_FILE,
    read_exit_code,
    stopped_by,
    write_rejection,
)
from runtime.filesystem import atomic_write_text
from runtime.log import logger
from runtime.run_lock import lock_run
from runtime.signals import SIGNALS
from tests.lib.control import control_of
from tests.lib.durability import recorded_durability
from tests.lib.patience import PATIENCE_SECONDS
from tests.lib.ranks import RankPool


def stop_by_step(folder: Path) -> list[str | None]:
    """Stop reason after each step on this rank."""
    reasons = []
    with control_of(folder) as run:
        rank = dist.get_rank()
        for step in range(4):
            if (step, rank) == (1, 1):
                os.kill(os.getpid(), signal.SIGUSR1)
                os.kill(os.getpid(), signal.SIGINT)
            if (step, rank) == (2, 0):
                (folder / "stop").touch()
                os.kill(os.getpid(), signal.SIGTERM)
            assert run.all_reduce_counts(rows=rank, step=step) == {"rows": 1, "step": 2 * step}
            reasons.append(run.stop)
    return reasons


def test_first_request_of_any_rank_is_the_reason_on_all_ranks(
    ranks: RankPool, tmp_path: Path
) -> None:
    expected = [None, "SIGUSR1", "SIGUSR1", "SIGUSR1"]
    assert ranks.run(stop_by_step, 2, tmp_path / "control") == [expected, expected]


@pytest.mark.parametrize(
    ("reason", "has_checkpoints", "code"),
    [
        ("SIGTERM", True, PREEMPTED),
        # Requeued, it would begin again each time.
        ("SIGTERM", False, FAILED),
        (STOP_FILE.reason, True, DONE),
        (STOP_FILE.reason, False, DONE),
    ],
)
def test_only_a_signal_to_a_run_with_checkpoints_asks_to_requeue(
    reason: str, has_checkpoints: bool, code: int
) -> None:
    assert stopped_by(reason, has_checkpoints=has_checkpoints).code == code


def stop_after_hangup(folder: Path) -> str | None:
    """Reason to stop after SIGHUP, which was ignored before, and then SIGXCPU."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with control_of(folder) as run:
        for number in (signal.SIGHUP, signal.SIGXCPU):
            os.kill(os.getpid(), number)
        run.all_reduce_counts()
        return run.stop


def test_hangup_is_ignored_under_nohup(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(stop_after_hangup, 1, tmp_path / "control") == ["SIGXCPU"]


def reason_to_stop(folder: Path, make: Callable[[Path], None] | None = None) -> str | None:
    """Reason to stop of a start, during which ``make`` makes control/stop."""
    with control_of(folder) as run:
        if make is not None:
            make(folder / "stop")
        run.all_reduce_counts()
        run.clear_previous_outcome()
        dist.barrier()
        return run.stop


def test_next_start_deletes_outcome_and_stop_of_the_last(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "run" / "control").mkdir(parents=True)
    for name in ("outcome", "stop", "progress"):
        (tmp_path / "run" / "control" / name).write_text("1\n")
    assert ranks.run(reason_to_stop, 2, tmp_path / "run" / "control") == [None, None]
    assert {path.name for path in (tmp_path / "run" / "control").iterdir()} == {"progress", "lock"}


def send_three_signals(folder: Path, after: float) -> None:
    control.FORCE_EXIT_AFTER_SECONDS = 0.5 if after else PATIENCE_SECONDS
    RunControl(folder)
    for number, pause in ((signal.SIGINT, 0.0), (signal.SIGTERM, after), (signal.SIGTERM, 0.0)):
        os.kill(os.getpid(), number)
        time.sleep(pause)
    os._exit(7)


@pytest.mark.parametrize(("after", "code"), [(0.0, 7), (0.6, 128 + signal.SIGTERM)])
def test_later_signal_ends_the_process_at_once(tmp_path: Path, after: float, code: int) -> None:
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=send_three_signals, args=(tmp_path, after))
    process.start()
    process.join(PATIENCE_SECONDS)
    assert process.exitcode == code


def write_outcomes(folder: Path) -> None:
    with control_of(folder) as run:
        run.report("outcome", "an old one, and long")
        full = OSError("full")
        with patch("os.replace", side_effect=full), patch.object(logger, "error") as alarm:
            run.report("outcome", "half")
            run.report("outcome", "half")
        assert "full" in str(alarm.call_args)
        assert alarm.call_count == 1
        assert (folder / "outcome").read_text() == "an old one, and long\n"
        run.end("done")
        assert (folder / "outcome").read_text() == "done\n"
        for number in SIGNALS:
            os.kill(os.getpid(), number)
        run.all_reduce_counts()
        assert run.stop is None


def test_outcome_is_written_atomically_and_signals_keep_it(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(write_outcomes, 1, tmp_path / "control")


def test_outcome_survives_a_power_cut(tmp_path: Path) -> None:
    with recorded_durability() as calls:
        atomic_write_text(tmp_path / "outcome", "done")
    assert calls == [("fsync", tmp_path / ".outcome")]


def test_locked_folder_names_the_process(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("4711 on a host with a very long name that was here before\n")
    with lock_run(tmp_path):
        me = f"process {os.getpid()} on {socket.gethostname()} is writing to {tmp_path.parent} now"
        with pytest.raises(ConfigError, match=rf"^job\.name: {me}$"):
            lock_run(tmp_path)
    lock_run(tmp_path).close()


def test_file_system_without_locks_is_an_error_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(file: object, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))  # Lustre without its option

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(ConfigError, match=r"job\.output_dir: .*lock cannot be locked: .*flock"):
        lock_run(tmp_path)


def stop_twice(folder: Path, make: Callable[[Path], None]) -> tuple[str | None, str | None]:
    """Reason to stop with what ``make`` puts at control/stop, and of the next start."""
    return reason_to_stop(folder, make), reason_to_stop(folder)


def stop_beside_another_start(folder: Path) -> str | None:
    """Reason to stop that a start finds which another follows before it locks the folder."""
    with control_of(folder.parent.parent / "other" / "control"):
        run = RunControl(folder)
        folder.mkdir(parents=True)
        (folder / "stop").touch()
        second = RunControl(folder)
        run.acquire_lock()
        with pytest.raises(ConfigError, match="is writing to"):
            second.acquire_lock()
        run.all_reduce_counts()
        return run.stop


def test_a_rejected_start_leaves_the_stop_of_the_run(ranks: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "control"
    assert ranks.run(stop_beside_another_start, 1, folder) == [STOP_FILE.reason]


def codes_around_the_lock(folder: Path) -> list[int | None]:
    """Exit code in the folder before and after a start locks it, which was rejected beside it."""
    with control_of(folder.parent.parent / "other" / "control"):
        run = RunControl(folder)
        folder.mkdir(parents=True)
        write_rejection(folder, "training.step: unknown")
        found = [read_exit_code(folder)]
        run.acquire_lock()
        return [*found, read_exit_code(folder)]


def test_a_rejected_start_leaves_no_exit_code_in_the_run(ranks: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "control"
    assert ranks.run(codes_around_the_lock, 1, folder) == [[BAD_CONFIG, None]]


def make_full_folder(path: Path) -> None:
    path.mkdir()
    (path / "why.txt").touch()


def make_broken_link(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize("make", [Path.mkdir, make_full_folder, os.mkfifo])
def test_anything_named_stop_stops_the_run_once(
    ranks: RankPool, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    found = ranks.run(stop_twice, 1, tmp_path / "control", make)
    assert found == [(STOP_FILE.reason, None)]


def test_a_broken_link_stops_the_run(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(reason_to_stop, 1, tmp_path / "control", make_broken_link)
    assert found == [STOP_FILE.reason]


def lose_lock(folder: Path, then: str) -> str:
    """Rename the run's folder while it trains; return how the next step ends."""
    with control_of(folder) as run:
        if dist.get_rank() == 0:
            folder.parent.rename(folder.parent.with_name("renamed"))
            if then == "another starts":
                folder.mkdir(parents=True)
                other = lock_run(folder)
                other.truncate(0)
                other.write("4711 on elsewhere\n")
                other.flush()
        try:
            with patch.object(logger, "error") as alarm:
                run.all_reduce_counts()
        except ConfigError as error:
            return str(error)
        if dist.get_rank() == 0:
            with pytest.raises(ConfigError, match="is writing to"):
                lock_run(folder)
            with pytest.raises(ConfigError, match="is writing to"):
                lock_run(folder.parent.with_name("renamed") / "control")
        return str(alarm.call_args)


def test_renamed_folder_is_locked_again_under_both_names(ranks: RankPool, tmp_path: Path) -> None:
    logged, _ = ranks.run(lose_lock, 2, tmp_path / "run" / "control", "")
    assert "was removed or renamed" in logged


def lose_output_dir(folder: Path) -> str:
    with control_of(folder) as run:
        if dist.get_rank() == 0:
            folder.parent.parent.rename(folder.parent.parent.with_name("renamed"))
        with pytest.raises(ConfigError) as caught:
            run.all_reduce_counts()
    return str(caught.value)


def test_run_ends_if_the_output_dir_is_gone(ranks: RankPool, tmp_path: Path) -> None:
    output_dir = tmp_path / "outputs"
    errors = ranks.run(lose_output_dir, 2, output_dir / "run" / "control")
    assert errors[0] == f"job.output_dir: {output_dir} was removed while the run trains"
    assert not output_dir.exists()


def test_run_ends_if_another_one_took_its_folder(ranks: RankPool, tmp_path: Path) -> None:
    errors = ranks.run(lose_lock, 2, tmp_path / "run" / "control", "another starts")
    assert "is writing to" in errors[0]
    assert errors[1].startswith("job.name: rank 0 lost ")


def share_lock(folder: Path) -> str:
    """Another node's process locks the same file, on a file system whose locks do not reach it."""
    with control_of(folder) as run:
        run.check_lock()
        (folder / "lock").write_text("4711 on elsewhere\n")
        with pytest.raises(ConfigError) as caught:
            run.check_lock()
    return str(caught.value)


def test_second_holder_of_the_same_lock_ends_the_run(ranks: RankPool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    found = ranks.run(share_lock, 1, run / "control")
    assert found == [f"job.name: process 4711 on elsewhere is writing to {run} now"]


def lock_error(folder: Path) -> str:
    with patch("signal.signal"), pytest.raises(ConfigError) as caught:
        RunControl(folder).acquire_lock()
    return str(caught.value)


def test_unusable_folder_is_named_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    errors = ranks.run(lock_error, 2, tmp_path / "file" / "control")
    assert errors[0] == errors[1]
    assert errors[0].startswith("job.output_dir: ")
    with lock_run(tmp_path):
        errors = ranks.run(lock_error, 2, tmp_path)
    assert errors[0] == errors[1]
    assert errors[0].startswith(f"job.name: process {os.getpid()} ")
