"""Traces and memory snapshots, by key."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from config.job_config import Profiling
from runtime.log import logger

TRACED_STEPS = 2


@contextmanager
def profiler(folder: Path, config: Profiling, *, rank: int) -> Iterator[Callable[[int], None]]:
    """Give the function to call with each finished step; it writes what ``config`` asks to
    ``folder`` (open a trace in Perfetto)."""
    snapshots = config.enable_memory_snapshot
    if snapshots:
        torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    if not config.enable_trace and not snapshots:
        yield lambda step: None
        return
    folder.mkdir(parents=True, exist_ok=True)
    trace = _trace(folder, config, rank) if config.enable_trace else None

    def finish_step(step: int) -> None:
        if trace is not None:
            trace.step()
        if snapshots and step % config.trace_freq == 0:
            path = folder / f"memory-step-{step:08d}-rank{rank}.pickle"
            torch.cuda.memory._dump_snapshot(str(path))

    if trace is not None:
        trace.start()
    try:
        yield finish_step
    finally:
        if trace is not None:
            trace.stop()
        if snapshots:
            torch.cuda.memory._record_memory_history(enabled=None)


def _trace(folder: Path, config: Profiling, rank: int) -> torch.profiler.profile:
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)

    def write(profile: torch.profiler.profile) -> None:
        path = folder / f"trace-step-{profile.step_num:08d}-rank{rank}.json.gz"
        profile.export_chrome_trace(str(path))
        logger.info("trace: %s", path)

    wait = max(0, config.trace_freq - 1 - TRACED_STEPS)
    schedule = torch.profiler.schedule(wait=wait, warmup=1, active=TRACED_STEPS)
    return torch.profiler.profile(
        activities=activities, schedule=schedule, on_trace_ready=write, record_shapes=True
    )
