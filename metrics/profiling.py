"""Profiler traces of training steps, and CUDA memory snapshots: regularly, or on request."""

import os
from collections.abc import Callable, Collection
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, record_function

from config.job_config import Profiling
from metrics.trace_file import STEP
from runtime.commands import command_text
from runtime.compat import find, require
from runtime.control import SNAPSHOT, TRACE
from runtime.filesystem import make_folder, replaced_file
from runtime.log import logger
from runtime.run_folder import WriteAlarm

TRACED_STEPS = 2
RECORD, DUMP = "torch.cuda.memory:_record_memory_history", "torch.cuda.memory:_dump_snapshot"
MAX_ALLOCATIONS = 1_000_000


class StepProfiler:
    """Profiles steps between ``begin_step`` and ``end_step``; what is between two is not a step.

    A trace is prepared in the step before its first, so that neither the profiler's own start nor
    the first step of the process, which compiles, is in it.
    """

    def __init__(self, folder: Path, config: Profiling, *, rank: int) -> None:
        """``folder``: the run's. Raises ``ConfigError`` if this PyTorch lacks memory snapshots."""
        self._run_folder, self._folder = folder, folder / "traces"
        self._config, self._rank = config, rank
        self._alarm = WriteAlarm()
        self._wanted: set[str] = set()
        self._trace: torch.profiler.profile | None = None
        self._first_step, self._step = 0, 0
        self._range: record_function | None = None
        self._snapshots_step = False
        # Kineto prints a line at each start and stop of a trace. It reads this at the first one.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        if config.enable_memory_snapshot:
            key = "profiling.enable_memory_snapshot"
            require(DUMP, key=key)
            require(RECORD, key=key)(max_entries=MAX_ALLOCATIONS)

    def request(self, names: Collection[str]) -> None:
        """Write a trace (``TRACE``) or a memory snapshot (``SNAPSHOT``) of the next steps."""
        self._wanted.update(names)
        if SNAPSHOT in names and not torch.cuda.is_available():
            logger.warning("memory snapshot: requires a CUDA device")
            self._wanted.discard(SNAPSHOT)

    def begin_step(self, step: int) -> None:
        """Begin step ``step``, 1-based, before its batch is taken."""
        if self._trace is not None and step != self._step + 1:
            # A rollback: the steps of the trace do not follow each other.
            self._discard()
        self._step = step
        if SNAPSHOT in self._wanted:
            self._wanted.discard(SNAPSHOT)
            self._snapshots_step = True
            if not self._config.enable_memory_snapshot:
                self._record(max_entries=MAX_ALLOCATIONS)
        if self._trace is None and self._is_trace_due(step):
            self._trace, self._first_step = _build_profiler(), step + 1
            self._wanted.discard(TRACE)
            self._trace.prepare_trace()
        elif self._trace is not None:
            if step == self._first_step:
                self._trace.start_trace()
            self._range = record_function(f"{STEP}{step}")
            self._range.__enter__()

    def is_writing(self, step: int) -> bool:
        """True if ``end_step`` will write a file."""
        return (self._trace is not None and self._ends_trace(step)) or self._is_snapshot_due(step)

    def end_step(self, step: int) -> None:
        """End step ``step``: write what is complete."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if self._trace is not None and self._ends_trace(step):
            self._trace.stop_trace()
            self._write(f"trace-step-{step:08d}-rank{self._rank}.json.gz", self._trace)
            self._trace = None
        if self._is_snapshot_due(step):
            self._snapshot(step)

    def close(self) -> None:
        """End without writing: a trace of fewer steps would be compared with whole ones."""
        self._discard()
        if self._config.enable_memory_snapshot:
            self._record(enabled=None)

    def _is_trace_due(self, step: int) -> bool:
        is_regular = (step + TRACED_STEPS) % self._config.trace_freq == 0
        return TRACE in self._wanted or (self._config.enable_trace and is_regular)

    def _ends_trace(self, step: int) -> bool:
        return step == self._first_step + TRACED_STEPS - 1

    def _is_snapshot_due(self, step: int) -> bool:
        is_regular = step % self._config.trace_freq == 0
        return (self._config.enable_memory_snapshot and is_regular) or self._snapshots_step

    def _discard(self) -> None:
        trace, self._trace = self._trace, None
        if trace is None:
            return
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        elif self._step < self._first_step:
            # The profiler can stop only after a start.
            trace.start_trace()
        trace.stop_trace()

    def _write(self, name: str, trace: torch.profiler.profile) -> None:
        path = self._folder / name
        if self._save(path, trace.export_chrome_trace):
            command = command_text("profile", self._run_folder)
            logger.info("trace: %s; summary: %s; timeline: ui.perfetto.dev", path, command)

    def _snapshot(self, step: int) -> None:
        self._snapshots_step = False
        path = self._folder / f"memory-step-{step:08d}-rank{self._rank}.pickle"
        dump = find(DUMP)
        if dump is not None and self._save(path, dump):
            logger.info("memory snapshot: %s; view at pytorch.org/memory_viz", path)
        if not self._config.enable_memory_snapshot:
            self._record(enabled=None)

    def _save(self, path: Path, write: Callable[[str], object]) -> bool:
        """Replace ``path`` by what ``write`` writes; return False after an alarm."""
        is_written = False
        with self._alarm.of(path):
            make_folder(self._folder)
            with replaced_file(path) as scratch:
                write(str(scratch))
            is_written = True
        return is_written

    def _record(self, **options: object) -> None:
        record = find(RECORD)
        if record is not None:
            record(**options)


def _build_profiler() -> torch.profiler.profile:
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    # It has one cycle. Without acc_events PyTorch 2.11 warns that it forgets those before.
    return torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True)
