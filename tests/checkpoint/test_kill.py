"""A kill at any moment of a save loses nothing that was saved, and shows nothing torn."""

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from checkpoint import checkpointer
from checkpoint.checkpointer import Checkpointer
from checkpoint.manifest import faults, read_manifest
from config.job_config import Checkpoint
from tests.checkpoint.small_run import Values

PATIENCE_SECONDS = 60
ROWS = 256
Mode = Literal["disabled", "async"]


class Weights:
    """Every element is the step, so that a mixture of two steps shows. Each rank holds rows."""

    def __init__(self) -> None:
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        shards = [torch.zeros(ROWS // mesh.size(), 1024) for _ in range(4)]
        shard = dist.tensor.Shard(0)
        self.tensors = {
            str(i): dist.tensor.DTensor.from_local(local, mesh, [shard], run_check=False)
            for i, local in enumerate(shards)
        }

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.tensors)

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        self.tensors = state_dict

    @property
    def parts(self) -> list[torch.Tensor]:
        return [tensor.to_local() for tensor in self.tensors.values()]


class Training:
    """Ranks that save after every step, as ``train.py`` does."""

    def __init__(self, folder: Path, mode: Mode, rank: int, world_size: int) -> None:
        store = dist.FileStore(str(folder.with_name(f"{folder.name}-store")), world_size)
        timeout = timedelta(seconds=PATIENCE_SECONDS)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout
        )
        self.weights, self.values = Weights(), Values()
        self.checkpointer = Checkpointer(
            folder,
            Checkpoint(keep_latest_k=2, async_mode=mode),
            tensors={"model": self.weights},
            values={"train": self.values},
            facts={},
            check=lambda manifest: None,
        )

    def resume(self) -> int:
        step = self.checkpointer.load_latest() or 0
        assert all((part == step).all() for part in self.weights.parts)
        assert self.values.state == ({"step": step} if step else {})
        return step

    def begin(self, step: int) -> None:
        for part in self.weights.parts:
            part.fill_(step)
        self.values.state = {"step": step}
        self.checkpointer.begin(step)
        # Training goes on: what is saved must be what was there.
        if self.checkpointer._config.async_mode == "async":
            for part in self.weights.parts:
                part.fill_(-1)

    def save(self, step: int) -> None:
        self.begin(step)
        self.checkpointer.finish()


def train(report: Connection, folder: Path, mode: Mode, rank: int, world_size: int) -> None:
    """Report the step it resumed from, then each that is saved."""
    training = Training(folder, mode, rank, world_size)
    step = training.resume()
    while True:
        report.send(step)
        step += 1
        training.save(step)


def save_and_die(
    report: Connection, folder: Path, steps: list[int], event: int, is_in_place: bool
) -> None:
    """Save ``steps``, but end just before the ``event``-th thing that is done to a file."""
    training = Training(folder, "disabled", 0, 1)
    training.resume()
    seen = count(1)

    def die_in_time(name: str, args: tuple[Any, ...]) -> None:
        if str(folder) + "/" in str(args) and next(seen) == event:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(die_in_time)
    with patch.object(Checkpointer, "_open_scratch", in_place) if is_in_place else nullcontext():
        for step in steps:
            training.save(step)
    training.checkpointer.close()


def in_place(checkpointer: Checkpointer, step: int) -> Path:
    """What the temporary folder is there to avoid."""
    folder = checkpointer._folder / f"step-{step:08d}"
    folder.mkdir()
    return folder


def die_at(
    report: Connection, folder: Path, phase: str, victim: int, rank: int, world_size: int
) -> None:
    """Save step 1, then die, or see another rank die, in a phase of the save of step 2."""
    training = Training(folder, "async", rank, world_size)
    training.save(1)
    target = {"publish": "_publish", "write": "write_parts"}[phase.split()[1]]
    owner: Any = Checkpointer if target == "_publish" else checkpointer
    original = getattr(owner, target)

    def dying(*args: Any) -> Any:
        if rank == victim and phase.startswith("before"):
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args)
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, target, dying)
    report.send("ready")
    training.save(2)


def save_slowly(report: Connection, folder: Path, rank: int, world_size: int) -> None:
    """Never finish the save of step 2: it is being written until somebody ends the process."""
    training = Training(folder, "async", rank, world_size)
    training.save(1)
    original = checkpointer.write_parts

    def slow(path: Path, *args: Any) -> Any:
        result = original(path, *args)
        report.send("written")
        time.sleep(PATIENCE_SECONDS)
        return result

    checkpointer.write_parts = slow
    training.save(2)


@contextmanager
def started(target: Callable[..., None], *args: Any) -> Iterator[tuple[BaseProcess, Connection]]:
    """A process and what it reports; killed at the end. Forked from one that has torch loaded."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *args))
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join(PATIENCE_SECONDS)


@contextmanager
def ranks_started(
    target: Callable[..., None], folder: Path, world_size: int, *args: Any
) -> Iterator[list[tuple[BaseProcess, Connection]]]:
    """``world_size`` of them, all killed at the end, as a node that goes down takes its ranks."""
    folder.with_name(f"{folder.name}-store").unlink(missing_ok=True)
    found: list[tuple[BaseProcess, Connection]] = []
    contexts = [started(target, folder, *args, rank, world_size) for rank in range(world_size)]
    try:
        for context in contexts:
            found.append(context.__enter__())
        yield found
    finally:
        for process, _ in found:
            process.kill()
        for context in contexts[: len(found)]:
            context.__exit__(None, None, None)


def reported(reports: Connection) -> list[int]:
    """All that a process reported before its end."""
    found = []
    while True:
        try:
            found.append(reports.recv())
        except EOFError:
            return found


def visible_steps(folder: Path) -> list[int]:
    """The steps that are published; each must be whole."""
    for path in folder.glob("step-*"):
        files = read_manifest(path)["files"]
        assert len(files) >= 3
        assert not faults(path, files, files)
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def kill_at_random(folder: Path, mode: Mode, n_trials: int) -> str:
    """Start ranks, kill them, and see that nothing was lost; what came of it."""
    draws = random.Random(0)
    n_torn = 0
    for _ in range(n_trials):
        before = visible_steps(folder)
        with ranks_started(train, folder, draws.choice([1, 2, 4]), mode) as started_ranks:
            reports = [connection for _, connection in started_ranks]
            # Never backwards: it resumes what is newest.
            assert {report.recv() for report in reports} == {max(before, default=0)}
            first = reports[0].recv()
            time.sleep(draws.uniform(0.0, 0.1))
        saved = reported(reports[0]) or [first]
        # Saved but not yet reported is fine; reported but not there is not.
        assert visible_steps(folder)[-1] - saved[-1] in (0, 1)
        n_torn += any(folder.glob(".tmp-*"))
    assert n_torn > 0, "no kill came during a save"
    return f"{n_trials} kills of 1, 2 or 4 ranks, {n_torn} of them during a save: 0 lost, 0 torn"


@pytest.mark.row(1, "A kill -9 during a save loses nothing")
def test_kills_at_random_moments_lose_nothing(
    tmp_path: Path, trials: Callable[[int], int], seen: Callable[[str], None]
) -> None:
    seen(kill_at_random(tmp_path / "run", "disabled", trials(100)))


@pytest.mark.row(2, "Nor is anything lost by one during an asynchronous save")
def test_kills_during_asynchronous_saves_lose_nothing(
    tmp_path: Path, trials: Callable[[int], int], seen: Callable[[str], None]
) -> None:
    seen(kill_at_random(tmp_path / "run", "async", trials(100)))


@pytest.mark.row(2, "Nor is anything lost by one during an asynchronous save")
@pytest.mark.parametrize("phase", ["before write", "after write", "before publish"])
def test_a_rank_that_dies_in_any_phase_loses_nothing(
    tmp_path: Path, phase: str, seen: Callable[[str], None]
) -> None:
    victims = [0] if "publish" in phase else [0, 1]
    for victim in victims:
        folder = tmp_path / str(victim)
        with ranks_started(die_at, folder, 2, phase, victim) as started_ranks:
            sentinels = [process.sentinel for process, _ in started_ranks]
            pending = set(sentinels)
            while pending:
                ended = wait(list(pending), timeout=PATIENCE_SECONDS)
                assert ended, "the other rank waits for the dead one"
                pending -= {int(sentinel) for sentinel in ended}  # type: ignore[arg-type]
        assert visible_steps(folder) == [1]
    seen(f"{phase}: {len(victims)} of {len(victims)} ranks")


@pytest.mark.row(3, "No writer outlives its run")
def test_nothing_is_published_after_a_kill(tmp_path: Path, seen: Callable[[str], None]) -> None:
    folder = tmp_path / "run"
    with ranks_started(save_slowly, folder, 2) as started_ranks:
        assert {report.recv() for _, report in started_ranks} == {"written"}
        pids = [process.pid for process, _ in started_ranks]
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()
    # All data is there and no process that could rename it.
    assert any(folder.glob(".tmp-step-00000002-*/rank-00001.bin"))
    assert visible_steps(folder) == [1]
    seen("2 ranks killed between write and publication: 0 published, 0 processes left")


def losses(base: Path, copies: Path, is_in_place: bool) -> tuple[list[int], int]:
    """The moments at which a kill loses something, and how many moments there are."""
    lost = []
    for event in count(1):
        folder = copies / str(event)
        shutil.copytree(base, folder)
        with started(save_and_die, folder, [3], event, is_in_place) as (process, _):
            process.join(PATIENCE_SECONDS)
        try:
            is_intact = visible_steps(folder) in ([1, 2], [1, 2, 3], [2, 3])
        except ValueError:
            is_intact = False
        if not is_intact:
            lost.append(event)
        if process.exitcode != -signal.SIGKILL:
            break
    return lost, event


@pytest.mark.row(1, "A kill -9 during a save loses nothing")
def test_kills_between_any_two_operations_lose_nothing(
    tmp_path: Path, seen: Callable[[str], None]
) -> None:
    base = tmp_path / "base"
    with started(save_and_die, base, [1, 2], 0, False) as (process, _):
        process.join(PATIENCE_SECONDS)
    (base / ".tmp-step-00000003-dead").mkdir()
    assert visible_steps(base) == [1, 2]
    lost, n_moments = losses(base, tmp_path / "saved", is_in_place=False)
    assert not lost
    assert n_moments > 12
    # The same kills find what is wrong with writing in place.
    lost_in_place, _ = losses(base, tmp_path / "saved_in_place", is_in_place=True)
    assert lost_in_place
    seen(f"before each of {n_moments} file operations: 0 lost; {len(lost_in_place)} if in place")
