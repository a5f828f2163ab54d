"""A kill at any moment of a save loses nothing that was saved, and shows nothing torn."""

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from checkpoint.checkpointer import Checkpointer
from checkpoint.manifest import faults, read_manifest
from config.job_config import Checkpoint
from tests.checkpoint.small_run import Values

TRIALS = 15
PATIENCE_SECONDS = 60


class Weights:
    """Every element is the step, so that a mixture of two steps shows."""

    def __init__(self) -> None:
        self.tensors = {str(i): torch.zeros(256, 1024) for i in range(4)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        self.tensors = state_dict


class Training:
    """A process of its own, that saves after every step."""

    def __init__(self, folder: Path) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.weights, self.values = Weights(), Values()
        self.checkpointer = Checkpointer(
            folder,
            Checkpoint(keep_latest_k=2),
            tensors={"model": self.weights},
            values={"train": self.values},
        )

    def resume(self) -> int:
        step = self.checkpointer.load_latest() or 0
        assert all((tensor == step).all() for tensor in self.weights.tensors.values())
        assert self.values.state == ({"step": step} if step else {})
        return step

    def save(self, step: int) -> None:
        for tensor in self.weights.tensors.values():
            tensor.fill_(step)
        self.values.state = {"step": step}
        self.checkpointer.save(step)


def train(report: Connection, folder: Path) -> None:
    """Report the step it resumed from, then each that is saved."""
    training = Training(folder)
    step = training.resume()
    while True:
        report.send(step)
        step += 1
        training.save(step)


def save_and_die(
    report: Connection, folder: Path, steps: list[int], event: int, is_in_place: bool
) -> None:
    """Save ``steps``, but end just before the ``event``-th thing that is done to a file."""
    training = Training(folder)
    training.resume()
    seen = count(1)

    def die_in_time(name: str, args: tuple[Any, ...]) -> None:
        if str(folder) in str(args) and next(seen) == event:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(die_in_time)
    with patch.object(Checkpointer, "_open_scratch", in_place) if is_in_place else nullcontext():
        for step in steps:
            training.save(step)


def in_place(checkpointer: Checkpointer, name: str) -> Path:
    """What the temporary folder is there to avoid."""
    folder = checkpointer._folder / name
    folder.mkdir()
    return folder


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
        assert len(files) == 3
        assert not faults(path, files, files)
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def test_kills_at_random_moments_lose_nothing(tmp_path: Path) -> None:
    waits = random.Random(0)
    n_torn = 0
    for _ in range(TRIALS):
        before = visible_steps(tmp_path)
        with started(train, tmp_path) as (_, reports):
            assert reports.recv() == max(before, default=0)
            first = reports.recv()
            time.sleep(waits.uniform(0.0, 0.1))
        saved = reported(reports) or [first]
        # Saved but not yet reported is fine; reported but not there is not.
        assert visible_steps(tmp_path)[-1] - saved[-1] in (0, 1)
        n_torn += any(tmp_path.glob(".tmp-*"))
    assert n_torn > 0, "no kill came during a save"


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


def test_kills_between_any_two_operations_lose_nothing(tmp_path: Path) -> None:
    base = tmp_path / "base"
    with started(save_and_die, base, [1, 2], 0, False) as (process, _):
        process.join(PATIENCE_SECONDS)
    (base / ".tmp-step-00000003-dead").mkdir()
    assert visible_steps(base) == [1, 2]
    lost, n_moments = losses(base, tmp_path / "saved", is_in_place=False)
    assert not lost
    assert n_moments > 20
    # The same kills find what is wrong with writing in place.
    lost, _ = losses(base, tmp_path / "saved_in_place", is_in_place=True)
    assert lost
