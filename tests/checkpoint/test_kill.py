"""A kill at any moment of a save loses no checkpoint and exposes no partial one."""

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator
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
from checkpoint.manifest import read_manifest, verify_files
from config.job_config import Checkpoint
from tests.lib.patience import PATIENCE_SECONDS
from tests.lib.small_run import Values

ROWS = 256
Mode = Literal["disabled", "async"]


class Weights:
    """Sharded weights whose elements all equal the step, so that a mixture of steps shows."""

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

    def load_targets(self, saved: Collection[str]) -> dict[str, torch.Tensor]:
        return self.state_dict()

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        self.tensors = state_dict

    @property
    def local_shards(self) -> list[torch.Tensor]:
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
            tensor_states={"model": self.weights},
            json_states={"train": self.values},
            metadata={},
            validate=lambda manifest: None,
        )

    def resume(self) -> int:
        step = self.checkpointer.load_latest() or 0
        assert all((shard == step).all() for shard in self.weights.local_shards)
        assert self.values.state == ({"step": step} if step else {})
        return step

    def begin(self, step: int) -> None:
        for shard in self.weights.local_shards:
            shard.fill_(step)
        self.values.state = {"step": step}
        self.checkpointer.begin(step)
        # Training goes on, and must not change what is saved.
        if self.checkpointer._config.async_mode == "async":
            for shard in self.weights.local_shards:
                shard.fill_(-1)

    def save(self, step: int) -> None:
        self.begin(step)
        self.checkpointer.finish()


def train(report: Connection, folder: Path, mode: Mode, rank: int, world_size: int) -> None:
    """Report the step resumed from, then each saved step."""
    training = Training(folder, mode, rank, world_size)
    step = training.resume()
    while True:
        report.send(step)
        step += 1
        training.save(step)


def save_and_die(
    report: Connection, folder: Path, steps: list[int], event: int, is_in_place: bool
) -> None:
    """Save ``steps``, but die before the ``event``-th file operation; 0: never."""
    training = Training(folder, "disabled", 0, 1)
    training.resume()
    seen = count(1)

    def die_at_event(name: str, args: tuple[Any, ...]) -> None:
        if str(folder) + "/" in str(args) and next(seen) == event:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(die_at_event)
    with (
        patch.object(Checkpointer, "_open_scratch", open_in_place) if is_in_place else nullcontext()
    ):
        for step in steps:
            training.save(step)
    training.checkpointer.close()


def open_in_place(checkpointer: Checkpointer, step: int) -> Path:
    """Write to the final folder: the fault that the temporary folder avoids."""
    folder = checkpointer._folder / f"step-{step:08d}"
    folder.mkdir()
    return folder


def die_at(
    report: Connection, folder: Path, phase: str, victim: int, rank: int, world_size: int
) -> None:
    """Save step 1, then step 2, in a phase of which rank ``victim`` dies."""
    training = Training(folder, "async", rank, world_size)
    training.save(1)
    target = {"publish": "_commit", "write": "write_tensor_file"}[phase.split()[1]]
    owner: Any = Checkpointer if target == "_commit" else checkpointer
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
    """Save step 1, then block in the save of step 2 until killed."""
    training = Training(folder, "async", rank, world_size)
    training.save(1)
    original = checkpointer.write_tensor_file

    def slow(path: Path, *args: Any) -> Any:
        result = original(path, *args)
        report.send("written")
        time.sleep(PATIENCE_SECONDS)
        return result

    checkpointer.write_tensor_file = slow
    training.save(2)


@contextmanager
def started(target: Callable[..., None], *args: Any) -> Iterator[tuple[BaseProcess, Connection]]:
    """Start a process with a connection for its reports; kill it at the end.

    It is forked from a server that has imported torch.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    receiver, sender = context.Pipe()
    process = context.Process(target=target, args=(sender, *args))
    process.start()
    sender.close()
    try:
        yield process, receiver
    finally:
        process.kill()
        process.join(PATIENCE_SECONDS)


@contextmanager
def ranks_started(
    target: Callable[..., None], folder: Path, world_size: int, *args: Any
) -> Iterator[list[tuple[BaseProcess, Connection]]]:
    """Start ``world_size`` processes; kill all at the end, as the failure of a node does."""
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


def receive_all(reports: Connection) -> list[int]:
    """All reports of a process until its end."""
    found = []
    while True:
        try:
            found.append(reports.recv())
        except EOFError:
            return found


def visible_steps(folder: Path) -> list[int]:
    """Steps with a committed checkpoint; asserts that each is complete."""
    for path in folder.glob("step-*"):
        files = read_manifest(path)["files"]
        assert len(files) >= 3
        assert not verify_files(path, files, files)
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def kill_at_random(folder: Path, mode: Mode, n_trials: int) -> str:
    """Start and kill ranks repeatedly, and assert that nothing is lost; return a summary."""
    rng = random.Random(0)
    n_torn = 0
    for _ in range(n_trials):
        before = visible_steps(folder)
        with ranks_started(train, folder, rng.choice([1, 2, 4]), mode) as started_ranks:
            reports = [connection for _, connection in started_ranks]
            # Always resumes from the newest.
            assert {report.recv() for report in reports} == {max(before, default=0)}
            first = reports[0].recv()
            time.sleep(rng.uniform(0.0, 0.1))
        saved = receive_all(reports[0]) or [first]
        # A saved step may not be reported yet, but a reported one must be saved.
        assert visible_steps(folder)[-1] - saved[-1] in (0, 1)
        n_torn += any(folder.glob(".tmp-*"))
    assert n_torn > 0, "no kill came during a save"
    return f"{n_trials} kills of 1, 2 or 4 ranks, {n_torn} of them during a save: 0 lost, 0 torn"


@pytest.mark.row(1, "A kill -9 during a save loses nothing")
def test_kills_during_sync_saves_lose_nothing(
    tmp_path: Path, trials: Callable[[int], int], record_result: Callable[[str], None]
) -> None:
    record_result(kill_at_random(tmp_path / "run", "disabled", trials(100)))


@pytest.mark.row(2, "Nor is anything lost by one during an asynchronous save")
def test_kills_during_async_saves_lose_nothing(
    tmp_path: Path, trials: Callable[[int], int], record_result: Callable[[str], None]
) -> None:
    record_result(kill_at_random(tmp_path / "run", "async", trials(100)))


@pytest.mark.row(2, "Nor is anything lost by one during an asynchronous save")
@pytest.mark.parametrize("phase", ["before write", "after write", "before publish"])
def test_death_of_one_rank_in_any_phase_loses_nothing(
    tmp_path: Path, phase: str, record_result: Callable[[str], None]
) -> None:
    victims = [0] if "publish" in phase else [0, 1]
    for victim in victims:
        folder = tmp_path / str(victim)
        with ranks_started(die_at, folder, 2, phase, victim) as started_ranks:
            sentinels = [process.sentinel for process, _ in started_ranks]
            pending = set(sentinels)
            while pending:
                ended = wait(list(pending), timeout=PATIENCE_SECONDS)
                assert ended, "the other rank hangs"
                pending -= {int(sentinel) for sentinel in ended}  # type: ignore[arg-type]
        assert visible_steps(folder) == [1]
    record_result(f"{phase}: {len(victims)} of {len(victims)} ranks")


@pytest.mark.row(3, "No writer outlives its run")
def test_no_writer_outlives_a_kill(tmp_path: Path, record_result: Callable[[str], None]) -> None:
    folder = tmp_path / "run"
    with ranks_started(save_slowly, folder, 2) as started_ranks:
        assert {report.recv() for _, report in started_ranks} == {"written"}
        pids = [process.pid for process, _ in started_ranks]
        threads = [thread for pid in pids for thread in Path(f"/proc/{pid}/task").iterdir()]
        # They would outlive their rank.
        assert not any((thread / "children").read_text() for thread in threads)
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()
    # All data is written, but no process is left to rename it.
    assert any(folder.glob(".tmp-step-00000002-*/rank-00001.bin"))
    assert visible_steps(folder) == [1]
    record_result("2 ranks killed between write and publication: 0 published, 0 processes left")


def losses(base: Path, copies: Path, is_in_place: bool) -> tuple[list[int], int]:
    """File operations before which a kill loses a checkpoint, and the number of operations."""
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
    tmp_path: Path, record_result: Callable[[str], None]
) -> None:
    base = tmp_path / "base"
    with started(save_and_die, base, [1, 2], 0, False) as (process, _):
        process.join(PATIENCE_SECONDS)
    (base / ".tmp-step-00000003-dead").mkdir()
    assert visible_steps(base) == [1, 2]
    lost, n_moments = losses(base, tmp_path / "saved", is_in_place=False)
    assert not lost
    assert n_moments > 12
    # The same kills must detect that writing in place loses checkpoints.
    lost_in_place, _ = losses(base, tmp_path / "saved_in_place", is_in_place=True)
    assert lost_in_place
    record_result(
        f"before each of {n_moments} file operations: 0 lost; {len(lost_in_place)} if in place"
    )
