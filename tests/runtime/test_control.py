"""Requests to stop reach all ranks at one step, and one process at a time has a run's folder."""

import os
import signal
import socket
import time
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from config import ConfigError
from runtime import control
from runtime.control import SIGNALS, RunControl, lock_run
from runtime.exit_codes import STOP_FILE
from tests.data.test_feed import control_of
from tests.ranks import RankPool


def stops(folder: Path) -> list[str | None]:
    """What each step's end is told, on this rank."""
    told = []
    with control_of(folder) as run:
        rank = dist.get_rank()
        for step in range(4):
            if (step, rank) == (1, 1):
                os.kill(os.getpid(), signal.SIGUSR1)
                os.kill(os.getpid(), signal.SIGINT)
            if (step, rank) == (2, 0):
                (folder / "stop").touch()
                os.kill(os.getpid(), signal.SIGTERM)
            assert run.agree(rows=rank, step=step) == {"rows": 1, "step": 2 * step}
            told.append(run.stop)
    return told


def test_the_first_request_of_any_rank_is_the_reason_on_all(
    ranks: RankPool, tmp_path: Path
) -> None:
    expected = [None, "SIGUSR1", "SIGUSR1", "SIGUSR1"]
    assert ranks.run(stops, 2, tmp_path / "control") == [expected, expected]


def goes_on(folder: Path) -> list[str | None]:
    told = []
    with control_of(folder) as run:
        for _ in range(2):
            run.agree()
            told.append(run.stop)
            run.stop = None
            run.forget()
            dist.barrier()
    return told


def test_a_start_that_goes_on_forgets_how_the_last_one_ended(
    ranks: RankPool, tmp_path: Path
) -> None:
    (tmp_path / "run" / "control").mkdir(parents=True)
    for name in ("outcome", "stop", "progress"):
        (tmp_path / "run" / "control" / name).write_text("1\n")
    found = ranks.run(goes_on, 2, tmp_path / "run" / "control")
    assert found == [[STOP_FILE.reason, None]] * 2
    assert {path.name for path in (tmp_path / "run" / "control").iterdir()} == {"progress", "lock"}


def insist(folder: Path, after: float) -> None:
    control.INSIST_SECONDS = 0.5
    RunControl(folder)
    for number, pause in ((signal.SIGINT, 0.0), (signal.SIGTERM, after), (signal.SIGTERM, 0.0)):
        os.kill(os.getpid(), number)
        time.sleep(pause)
    os._exit(7)


@pytest.mark.parametrize(("after", "code"), [(0.0, 7), (0.6, 128 + signal.SIGTERM)])
def test_a_later_signal_ends_the_process_at_once(tmp_path: Path, after: float, code: int) -> None:
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=insist, args=(tmp_path, after))
    process.start()
    process.join(60)
    assert process.exitcode == code


def ends(folder: Path) -> None:
    with control_of(folder) as run:
        run.report("outcome", "an old one, and long")
        with patch("os.replace", side_effect=OSError("full")), pytest.raises(OSError, match="full"):
            run.report("outcome", "half")
        assert (folder / "outcome").read_text() == "an old one, and long\n"
        run.end("done")
        assert (folder / "outcome").read_text() == "done\n"
        for number in SIGNALS:
            os.kill(os.getpid(), number)
        run.agree()
        assert run.stop is None


def test_an_outcome_is_told_as_a_whole_and_no_signal_changes_it(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(ends, 1, tmp_path / "control")


def test_a_folder_that_is_held_says_by_whom(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("4711 on a host with a very long name that was here before\n")
    with lock_run(tmp_path):
        me = f"process {os.getpid()} on {socket.gethostname()} is writing to {tmp_path.parent} now"
        with pytest.raises(ConfigError, match=rf"^job\.name: {me}$"):
            lock_run(tmp_path)
    lock_run(tmp_path).close()


def refusal(folder: Path) -> str:
    with patch("signal.signal"), pytest.raises(ConfigError) as refused:
        RunControl(folder).hold()
    return str(refused.value)


def test_a_folder_that_cannot_be_had_is_named_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told = ranks.run(refusal, 2, tmp_path / "file" / "control")
    assert told[0] == told[1]
    assert told[0].startswith("job.output_dir: ")
    with lock_run(tmp_path):
        told = ranks.run(refusal, 2, tmp_path)
    assert told[0] == told[1]
    assert told[0].startswith(f"job.name: process {os.getpid()} ")
