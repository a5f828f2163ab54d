"""Straggler detection: log ranks that compute slower than the others, which all wait for them."""

import socket
import time
from collections import deque
from collections.abc import Collection
from statistics import median, median_low
from typing import Any

import torch
import torch.nn as nn

from runtime.log import logger
from runtime.object_collectives import all_gather_object

LIMIT, WINDOWS = 1.2, 3


class Stragglers:
    """Times the forward pass of blocks during training.

    FSDP gathers weights before a block's timed forward, so ranks do not wait for each other in it.
    Exceptions are ranks of one tensor parallel group, which are slow together.
    """

    def __init__(self, blocks: Collection[nn.Module], *, window: int, device: torch.device) -> None:
        """``blocks``: already sharded and compiled. ``window``: steps between comparisons of ranks.

        Mutates ``blocks``: adds forward hooks. Collective.
        """
        self._window, self._steps, self._n_blocks = window, 0, len(blocks)
        self._clock = _DeviceClock() if device.type == "cuda" else _HostClock()
        self._seconds: list[float] = []
        self._hosts = all_gather_object(socket.gethostname())
        self._recent = deque[list[float]](maxlen=WINDOWS)
        self._reported: set[int] = set()
        self._metrics: dict[str, float] = {}
        # All blocks get the same hook objects, so that they share one compiled graph.
        start, stop = torch.compiler.disable(self._start), torch.compiler.disable(self._stop)
        for block in blocks:
            # Runs after FSDP gathers the block's weights, and before it reshards them.
            block.register_forward_pre_hook(start)
            block.register_forward_hook(stop, prepend=True)
        logger.info("stragglers: timing %d blocks, window = %d steps", len(blocks), window)

    def end_step(self) -> dict[str, float]:
        """Return metrics of the last window: the slowest rank, and its time over the median.

        {} before the first window ends. Logs a rank once, if it was above 1.2 times the median in
        each of the last three windows. Collective on the CPU at the end of a window; never waits
        for the device.
        """
        self._steps += 1
        self._seconds += self._clock.pop_elapsed()
        if self._steps % self._window == 0:
            # Per block, because pipeline stages may have unequal numbers of blocks.
            times = all_gather_object(
                median(self._seconds) / self._n_blocks if self._seconds else 0.0
            )
            self._seconds = []
            # A rank whose device lags many steps behind has no times yet.
            if min(times) > 0.0:
                self._compare(times)
        return dict(self._metrics)

    def _compare(self, times: list[float]) -> None:
        self._recent.append(times)
        ratios = _over_median(times)
        for rank in sorted(set(_slow_ranks(self._recent)) - self._reported):
            logger.warning(
                "rank %d on %s is slow: its blocks take %.2f times the median of all ranks",
                rank, self._hosts[rank], ratios[rank],
            )  # fmt: skip
            self._reported.add(rank)
        slowest = max(range(len(ratios)), key=ratios.__getitem__)
        self._metrics = {"slowest_rank": slowest, "slowest_over_median": ratios[slowest]}

    def _start(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled():
            self._clock.start()

    def _stop(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if torch.is_grad_enabled():
            self._clock.stop()


def _slow_ranks(windows: Collection[list[float]]) -> list[int]:
    """Return the ranks above ``LIMIT`` times the median in each of ``WINDOWS`` windows."""
    if len(windows) < WINDOWS:
        return []
    ratios = zip(*map(_over_median, windows), strict=True)
    return [rank for rank, rank_ratios in enumerate(ratios) if min(rank_ratios) > LIMIT]


def _over_median(times: list[float]) -> list[float]:
    # The lower median, because up to half of the ranks may be slow.
    middle = median_low(times)
    return [time / middle for time in times]


class _HostClock:
    """Sums consecutive intervals of host time per step."""

    def __init__(self) -> None:
        self._begin, self._total = 0.0, 0.0

    def start(self) -> None:
        self._begin = time.perf_counter()

    def stop(self) -> None:
        self._total += time.perf_counter() - self._begin

    def pop_elapsed(self) -> list[float]:
        """End a step; return its seconds."""
        total, self._total = self._total, 0.0
        return [total]


class _DeviceClock:
    """Sums intervals between CUDA events per step, read once the device has completed them."""

    def __init__(self) -> None:
        self._pairs: list[_Pair] = []
        self._steps = deque[list[_Pair]]()
        self._unused: list[_Pair] = []

    def start(self) -> None:
        self._pairs.append(self._unused.pop() if self._unused else (_event(), _event()))
        self._pairs[-1][0].record()

    def stop(self) -> None:
        self._pairs[-1][1].record()

    def pop_elapsed(self) -> list[float]:
        """End a step; return the seconds of each step that the device completed since."""
        if self._pairs:
            self._steps.append(self._pairs)
        self._pairs = []
        elapsed = []
        while self._steps and self._steps[0][-1][1].query():
            pairs = self._steps.popleft()
            elapsed.append(sum(begin.elapsed_time(end) for begin, end in pairs) / 1000.0)
            self._unused += pairs
        return elapsed


_Pair = tuple[torch.cuda.Event, torch.cuda.Event]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
