"""Run train.py on real ranks, forked from a process that has already imported torch."""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # FSDP imports it, in each rank
import torch._inductor.compile_fx  # compilation imports it, whatever the backend
import torch.distributed.pipelining
import torch.distributed.tensor.experimental  # compilation imports it

import train
from checkpoint.manifest import read_manifest, sizes_of
from checkpoint.tensor_files import DTYPES
from checkpoint.tensor_index import read_index
from data.text_files import builtin_files
from optim.spikes import LossSpikeDetector
from runtime.run_folder import list_checkpoints
from tests.lib.launch import small_keys
from tests.lib.patience import PATIENCE_SECONDS
from tests.lib.ports import free_port
from tests.lib.ranks import PRELOADED
from tests.lib.repository import ROOT

CONFIG = ROOT / "train_configs" / "debug_model.toml"
QUICK = {"activation_checkpoint.mode": "none", "validation.enable": "false"}
# They are kept, for all processes that are forked from one that imports this module.
builtin_files()


def nothing() -> None:
    pass


def spike_at_step_5() -> None:
    """Report a loss spike once, on all ranks."""
    original = LossSpikeDetector.is_spike

    def is_spike(self: LossSpikeDetector, step: int, **values: float) -> bool:
        if step == 5 and self.rollbacks == 0:
            return True
        return original(self, step, **values)

    LossSpikeDetector.is_spike = is_spike  # type: ignore[method-assign]


@contextmanager
def started(
    folder: Path,
    world_size: int,
    *,
    config: Path = CONFIG,
    plant: Callable[[], None] = nothing,
    **overrides: str,
) -> Iterator[list[BaseProcess]]:
    """Start ranks that train ``config`` in ``folder``; kill those still alive on exit.

    Rank ``r`` logs to ``folder/rank-r.log`` and calls ``plant`` before it trains.
    """
    folder.mkdir(exist_ok=True)
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    port, arguments = free_port(), [str(config), *options(folder, **overrides)]
    processes = [
        context.Process(target=_train, args=(folder, arguments, rank, world_size, port, plant))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def options(folder: Path, **overrides: str) -> list[str]:
    keys = small_keys(folder, QUICK | overrides)
    return [part for key, value in keys.items() for part in (f"--{key}", value)]


def run(folder: Path, world_size: int, **overrides: str) -> None:
    """Train to the end; fail if a rank does not exit with 0."""
    with started(folder, world_size, **overrides) as processes:
        assert codes(processes) == {0}, log(folder)


def codes(processes: list[BaseProcess]) -> set[int | None]:
    """Wait for all processes; return the set of their exit codes."""
    for process in processes:
        process.join(PATIENCE_SECONDS)
    return {process.exitcode for process in processes}


def log(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob("rank-*.log")))


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of the run, newest first."""
    return list_checkpoints(folder / "debug_model" / "checkpoints")


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Assemble all tensors of a checkpoint without the code that loads checkpoints."""
    whole = {}
    # A copy, because torch.frombuffer asks for writable memory.
    contents = cache(lambda file: bytearray((checkpoint / file).read_bytes()))
    for fqn, record in read_index(checkpoint, sizes_of(read_manifest(checkpoint))).items():
        whole[fqn] = torch.empty(record.shape, dtype=DTYPES[record.dtype])
        for shard in record.shards:
            count = math.prod(shard.sizes)
            if count:
                values = torch.frombuffer(
                    contents(shard.file),
                    dtype=DTYPES[record.dtype],
                    count=count,
                    offset=shard.file_offset,
                )
                box = tuple(
                    slice(o, o + n) for o, n in zip(shard.offsets, shard.sizes, strict=True)
                )
                whole[fqn][box] = values.view(shard.sizes)
    return whole


def differences(first: Path, second: Path) -> list[str]:
    """Names of tensors of two checkpoints that are not bitwise equal, and of differing files."""
    a, b = tensors(first), tensors(second)
    found = [fqn for fqn in a.keys() | b.keys() if fqn not in a or fqn not in b]
    found += [fqn for fqn in a.keys() & b.keys() if not torch.equal(_bits(a[fqn]), _bits(b[fqn]))]
    states = [json.loads((path / "state.json").read_text()) for path in (first, second)]
    return found + ["state.json"] * (states[0] != states[1])


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _train(
    folder: Path,
    arguments: list[str],
    rank: int,
    world_size: int,
    port: int,
    plant: Callable[[], None],
) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    output: Any = (folder / f"rank-{rank}.log").open("w")
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    train.init_logging()
    plant()
    sys.exit(train.start(arguments))
