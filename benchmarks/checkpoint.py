"""Seconds of a checkpoint: training blocked, until it is committed, and to load it.

The baseline is the disk alone: the same number of bytes written to a file and synced.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from benchmarks.counting import held_bytes
from benchmarks.rows import Row
from benchmarks.sharding import Case as ShardingCase
from benchmarks.sharding import Mode, build
from benchmarks.turns import Loop, Turns
from checkpoint.checkpointer import Checkpointer
from checkpoint.states import ModelState, OptimizerState
from config.job_config import Checkpoint, Comm, Count, Section
from runtime.distributed import init_distributed

# The steps of a round, in the order in which ranks make them.
ROUND = ("begin", "finish", "load", "write")
MODES: tuple[Literal["disabled", "async"], ...] = ("disabled", "async")


class Case(Section):
    ranks: Count
    shape: dict[str, int]
    rounds: Count
    """Rounds of which the median is taken, after one warmup round that creates the folders."""
    limit_seconds: Count = 180


def run(case: Case) -> Iterator[Row]:
    """Yield a row per mode of saving."""
    deadline = time.monotonic() + case.limit_seconds
    with (
        tempfile.TemporaryDirectory() as folder,
        Loop(save_loop, case, folder, ranks=case.ranks, deadline=deadline) as loop,
    ):
        rounds = [
            {mode: {part: loop.turn() for part in ROUND} for mode in MODES}
            for _ in range(case.rounds + 1)
        ][1:]
    size = loop.ready
    for mode in MODES:
        begin, finish, load, write = (
            statistics.median(turns[mode][part].seconds for turns in rounds) for part in ROUND
        )
        yield {
            "what": "save in the background" if mode == "async" else "save and wait",
            "mb": size / 1e6,
            "blocked_seconds": begin if mode == "async" else begin + finish,
            "save_seconds": begin + finish,
            "load_seconds": load,
            "save_mb_per_second": size / 1e6 / (begin + finish),
            "load_mb_per_second": size / 1e6 / load,
            "disk_mb_per_second": size / 1e6 / write,
        }


def save_loop(turns: Turns, case: Case, folder: str) -> None:
    """Begin, finish and load a save and write as many bytes, each in a turn, for each mode."""
    device = init_distributed(Comm())
    sharding = ShardingCase(modes=[], ranks=case.ranks, shape=case.shape, turns=1)
    mode = Mode(name="FSDP2")
    trainee = build(mode, sharding.args(mode), device, microbatches=1)
    # One step creates the optimizer state.
    trainee.step()
    model, optimizer = trainee.model, trainee.optimizer
    tensors = [*trainee.model.parameters()]
    tensors += [t for state in trainee.optimizer.state.values() for t in state.values()]
    own = held_bytes(tensors)
    sizes: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(sizes, own)
    turns.note = sum(sizes)
    checkpointers = {
        name: Checkpointer(
            Path(folder) / name,
            Checkpoint(async_mode=name, keep_latest_k=1),
            tensor_states={
                "model": ModelState(model),
                "optimizer": OptimizerState(model, optimizer),
            },
            json_states={},
            metadata={"config": {}},
            validate=lambda manifest: None,
        )
        for name in MODES
    }
    blob, step = os.urandom(own), 0
    while True:
        for checkpointer in checkpointers.values():
            step += 1
            turns.next_step()
            checkpointer.begin(step)
            turns.next_step()
            checkpointer.finish()
            turns.next_step()
            assert checkpointer.load_latest() == step
            turns.next_step()
            with (Path(folder) / f"rank-{dist.get_rank()}").open("wb") as file:
                file.write(blob)
                os.fsync(file.fileno())
