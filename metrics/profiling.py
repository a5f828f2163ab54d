"""Profiler traces and CUDA memory snapshots of configured steps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from config.job_config import Profiling
from runtime.compat import require
from runtime.filesystem import make_folder, replaced_file
from runtime.log import logger
from runtime.run_folder import WriteAlarm

TRACED_STEPS = 2


@contextmanager
def profiler(folder: Path, config: Profiling, *, rank: int) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with each finished step. It writes traces (for Perfetto) and memory
    snapshots to ``folder``, as ``config`` says."""
    snapshots = config.enable_memory_snapshot
    if not config.enable_trace and not snapshots:
        yield lambda step: None
        return
    if snapshots:
        key = "profiling.enable_memory_snapshot"
        record = require("torch.cuda.memory:_record_memory_history", key=key)
        dump = require("torch.cuda.memory:_dump_snapshot", key=key)
        record(max_entries=1_000_000)
    alarm, last_step = WriteAlarm(), 0

    def write(profile: torch.profiler.profile) -> None:
        path = folder / f"trace-step-{last_step:08d}-rank{rank}.json.gz"
        with alarm.of(path):
            make_folder(folder)
            with replaced_file(path) as scratch:
                profile.export_chrome_trace(str(scratch))
            logger.info("trace: %s", path)

    trace = _build_profiler(config, write) if config.enable_trace else None

    def finish_step(step: int) -> None:
        nonlocal last_step
        last_step = step
        if trace is not None:
            trace.step()
        if snapshots and step % config.trace_freq == 0:
            path = folder / f"memory-step-{step:08d}-rank{rank}.pickle"
            with alarm.of(path):
                make_folder(folder)
                with replaced_file(path) as scratch:
                    dump(str(scratch))

    if trace is not None:
        trace.start()
    try:
        yield finish_step
    finally:
        if trace is not None:
            trace.stop()
        if snapshots:
            record(enabled=None)


def _build_profiler(
    config: Profiling, write: Callable[[torch.profiler.profile], None]
) -> torch.profiler.profile:
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)

    wait = config.trace_freq - 1 - TRACED_STEPS
    schedule = torch.profiler.schedule(wait=wait, warmup=1, active=TRACED_STEPS)
    return torch.profiler.profile(
        activities=activities, schedule=schedule, on_trace_ready=write, record_shapes=True
    )
