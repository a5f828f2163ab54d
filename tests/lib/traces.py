"""Traces made by hand in the format of Kineto, and traces of small steps."""

import gzip
import json
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function

from config.job_config import Profiling
from metrics.profiling import StepProfiler


def run_steps(
    folder: Path,
    steps: Iterable[int],
    *,
    rank: int = 3,
    requests: dict[int, set[str]] | None = None,
    **config: bool | int,
) -> list[str]:
    """Profile steps of one matmul, each followed by a validation; return the files' names."""
    with closing(StepProfiler(folder.parent, Profiling(**config), rank=rank)) as profiler:
        for step in steps:
            profiler.begin_step(step)
            profiler.request((requests or {}).get(step, set()))
            torch.ones(4, 4) @ torch.ones(4, 4)
            profiler.end_step(step)
            with record_function("validation"):
                torch.ones(4) * torch.ones(4)
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


Event = dict[str, Any]
HOST, LOADER, COMPUTE, COMM = 100, 101, 7, 20


def event(cat: str, name: str, begin: float, end: float, tid: int = HOST, **args: Any) -> Event:
    times = {"ts": 4.8e12 + 1000 * begin, "dur": 1000 * (end - begin)}
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, **times, "args": args}


def annotation(name: str, begin: float, end: float) -> Event:
    return event("user_annotation", name, begin, end)


def step(number: int, begin: float, end: float) -> Event:
    return annotation(f"ProfilerStep#{number}", begin, end)


def device_step(number: int, begin: float, end: float, tid: int = COMPUTE) -> Event:
    return event("gpu_user_annotation", f"ProfilerStep#{number}", begin, end, tid)


def kernel(begin: float, end: float, name: str = "gemm") -> Event:
    return event("kernel", name, begin, end, COMPUTE, stream=COMPUTE)


def nccl(begin: float, end: float, kind: str = "AllGather", dim: str = "dp_shard") -> Event:
    args = {
        "Collective name": f"_{kind.lower()}_base",
        "Process Group Name": "1",
        "Process Group Description": f"mesh_{dim}",
        "Process Group Ranks": "[0, 1]",
    }
    name = f"ncclDevKernel_{kind}_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    return event("kernel", name, begin, end, COMM, **args)


def write(
    path: Path,
    *events: Event,
    rank: int = 0,
    world_size: int = 2,
    gpus: int = 1,
    groups: list[list[int]] | None = None,
) -> Path:
    """Write a trace as Kineto does: indented, in no order of time."""
    trace = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": index} for index in range(gpus)],
        "distributedInfo": {
            "backend": "nccl" if gpus else "gloo",
            "rank": rank,
            "world_size": world_size,
            "pg_config": [{"ranks": ranks} for ranks in (groups or [[0, 1]])],
        },
        "traceEvents": [{"ph": "M", "name": "process_name", "pid": 1}, *reversed(events)],
        "traceName": str(path),
    }
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt") as file:
        json.dump(trace, file, indent=2)
    return path
