"""Reasons why steps are slow, or will fail, from what is measured anyway: one log line each.

``./shardloom profile`` explains the rest, from a trace.
"""

import gc
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from metrics.gpu_telemetry import GpuTelemetry, summarize_gpus
from metrics.leaks import DEVICE, HOST, Leaks, find_leak
from metrics.logger import Window
from runtime.commands import command_text
from runtime.compat import find
from runtime.log import logger
from runtime.object_collectives import all_gather_object

# Shares of the time between two logged steps from which on a line is logged.
DATA_WAIT, GC = 0.1, 0.05
# Of a save: share of the time since the one before it, and seconds, from which on it is logged.
SAVE, SAVE_SECONDS = 0.1, 5.0
# A line is repeated only after this long, and if its cause was absent in between.
QUIET_SECONDS = 600.0
COMPILATIONS = "torch._dynamo.utils:get_compilation_metrics"


class SlowSteps:
    """Watches for slow data and saves, garbage collection, recompilation, leaks, bad GPUs."""

    def __init__(
        self, device: torch.device, *, gc_freq: int, is_writer: bool, is_resumed: bool
    ) -> None:
        """``gc_freq``: steps between garbage collections.

        ``is_writer``: logs what was measured on all ranks. ``is_resumed``: when the run saved
        before is not known.
        """
        self._device, self._is_writer = device, is_writer
        self._telemetry = GpuTelemetry.open(device)
        self._leaks = Leaks(device, block_steps=gc_freq)
        self._notices = Notices()
        # Over no fewer steps than lie between two collections.
        self._gc_freq, self._gc_share, self._gc_steps, self._seconds = gc_freq, 0.0, 0, 0.0
        self._gc_seconds, self._gc_begin = 0.0, 0.0
        gc.callbacks.append(self._on_gc)
        self._compilations: list[Any] = []
        self._saved_at = None if is_resumed else time.perf_counter()
        # The first step compiles, and waits for data that were not read ahead.
        self._is_first_window, self._n_steps = True, 0
        self._recompiled, self._recompiled_in = "", -1
        self._n_retries = self._alloc_retries()

    def end_step(self) -> None:
        """End a step. Raises the alarm if this rank compiles in consecutive steps."""
        self._n_steps += 1
        new = self._new_compilations()
        reasons = [each for each in new if getattr(each, "recompile_reason", None)]
        if not reasons or self._n_steps == 1:
            return
        if self._recompiled_in == self._n_steps - 1 and self._notices.is_new("recompilation", True):
            last = reasons[-1]
            self._recompiled = (
                "torch.compile recompiles in every step, which is slow and fails in the end:"
                f" {last.co_name} ({last.co_filename}:{last.co_firstlineno}):"
                f" {last.recompile_reason}; keep it constant, or set compile.enable = false"
            )
            # At once: the step that fails may come before the next logged one.
            logger.error("ALARM: %s", self._recompiled)
        self._recompiled_in = self._n_steps

    def end_window(self, step: int, window: Window, *, steps_left: float) -> dict[str, float]:
        """Compare the ranks' last steps; return metrics of the GPUs. Collective, on the CPU.

        ``window``: this rank's steps since the last call.
        """
        retries = self._alloc_retries()
        own = {
            "data_wait": window.data_wait / window.seconds,
            "gc": self._gc_share_after(window),
            "retries": retries - self._n_retries,
            "recompiled": self._recompiled,
            **({} if self._telemetry is None else self._telemetry.sample()),
            **self._leaks.sample(step),
        }
        self._n_retries = retries
        ranks: list[Mapping[str, Any]] = all_gather_object(own)
        if self._is_writer and not self._is_first_window:
            for kind, (is_slow, text) in hints(ranks).items():
                if self._notices.is_new(kind, is_slow):
                    logger.warning("slow: %s", text)
        self._is_first_window = False
        self._log_recompilation(ranks)
        self._log_leaks(
            ranks, steps_left=steps_left, seconds_per_step=window.seconds / window.steps
        )
        metrics, alarms = summarize_gpus(ranks)
        for kind, (is_bad, text) in alarms.items():
            if self._notices.is_new(kind, is_bad) and self._is_writer:
                logger.error("ALARM: %s", text)
        return metrics

    def end_save(self, seconds: float) -> None:
        """End a save for which the steps waited ``seconds``."""
        before, self._saved_at = self._saved_at, time.perf_counter()
        if before is None:
            return
        share = seconds / (self._saved_at - before)
        is_slow = share > SAVE and seconds > SAVE_SECONDS
        if self._notices.is_new("save", is_slow) and self._is_writer:
            logger.warning(
                "slow: saving a checkpoint took %.0f s, %.0f %% of the time since the one before:"
                ' raise checkpoint.interval, or set checkpoint.async_mode = "async"',
                seconds, 100 * share,
            )  # fmt: skip

    def _log_recompilation(self, ranks: list[Mapping[str, Any]]) -> None:
        """Log that another rank recompiles, unless this one's own was logged: rank 0 has alarms."""
        found = [(rank, text) for rank, each in enumerate(ranks) if (text := each["recompiled"])]
        if found and self._is_writer and self._notices.is_new("recompilation", True):
            logger.error("ALARM: rank %d: %s", *found[0])

    def _log_leaks(
        self, ranks: list[Mapping[str, Any]], *, steps_left: float, seconds_per_step: float
    ) -> None:
        for kind in (HOST, DEVICE):
            leak = find_leak(kind, ranks, steps_left)
            is_soon = leak is not None and leak.is_soon
            is_new = self._notices.is_new(f"{kind} leak", leak is not None and not is_soon)
            is_new_alarm = self._notices.is_new(f"{kind} full soon", is_soon)
            if leak is None or not self._is_writer:
                continue
            if is_new_alarm:
                logger.error("ALARM: %s", leak.text(seconds_per_step))
            elif is_new:
                logger.warning("%s", leak.text(seconds_per_step))

    def close(self) -> None:
        """Stop watching."""
        if self._on_gc in gc.callbacks:
            gc.callbacks.remove(self._on_gc)

    @contextmanager
    def without_gc(self) -> Iterator[None]:
        """Context whose garbage collections are not the steps'."""
        before = self._gc_seconds
        yield
        self._gc_seconds = before

    def _gc_share_after(self, window: Window) -> float:
        self._gc_steps += window.steps
        self._seconds += window.seconds
        if self._gc_steps >= self._gc_freq:
            self._gc_share = self._gc_seconds / self._seconds
            self._gc_steps, self._seconds, self._gc_seconds = 0, 0.0, 0.0
        return self._gc_share

    def _on_gc(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._gc_begin = time.perf_counter()
        else:
            self._gc_seconds += time.perf_counter() - self._gc_begin

    def _new_compilations(self) -> list[Any]:
        # The import is slow, and nothing compiles before it.
        read = find(COMPILATIONS) if COMPILATIONS.partition(":")[0] in sys.modules else None
        found = [] if read is None else read()
        # Only the newest are kept, so their number does not say which are new.
        known = {id(each) for each in self._compilations}
        new = [each for each in found if id(each) not in known]
        self._compilations = found
        return new

    def _alloc_retries(self) -> int:
        if self._device.type != "cuda":
            return 0
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))


class Notices:
    """Selects what is worth a line: what begins, not what goes on."""

    def __init__(self) -> None:
        self._present: set[str] = set()
        self._logged: dict[str, float] = {}

    def is_new(self, kind: str, is_present: bool) -> bool:
        """True if ``kind`` is present, was absent before, and was not logged for a while."""
        if not is_present:
            self._present.discard(kind)
            return False
        now = time.monotonic()
        if kind in self._present or now - self._logged.get(kind, -QUIET_SECONDS) < QUIET_SECONDS:
            return False
        self._present.add(kind)
        self._logged[kind] = now
        return True


def hints(ranks: list[Mapping[str, float]]) -> dict[str, tuple[bool, str]]:
    """Of each kind: is it slow, and the line that says so; from the values of every rank."""
    rank = {
        name: max(range(len(ranks)), key=lambda r: ranks[r][name])
        for name in ("data_wait", "gc", "retries")
    }
    worst = {name: ranks[rank[name]][name] for name in rank}
    tokens = command_text("prepare")
    return {
        "data": (
            worst["data_wait"] > DATA_WAIT,
            f"rank {rank['data_wait']} waited for data in {100 * worst['data_wait']:.0f} % of the"
            f" time since the last logged step: raise data.prefetch if its reads are bursts; else"
            f' tokenize once with {tokens} and read data.source = "tokens"',
        ),
        "gc": (
            worst["gc"] > GC,
            f"Python's garbage collection took {100 * worst['gc']:.0f} % of the time on rank"
            f" {rank['gc']}: raise training.gc_freq",
        ),
        "memory": (
            worst["retries"] > 0,
            f"GPU memory of rank {rank['retries']} was full, and its allocator freed its cache"
            f" {worst['retries']:.0f} times since the last logged step: lower"
            ' training.local_batch_size, or set activation_checkpoint.mode = "full"',
        ),
    }
