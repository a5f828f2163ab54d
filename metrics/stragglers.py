"""Ranks that compute slower than the others, by name: every step waits for the slowest one."""

import socket
import time
from collections import deque
from collections.abc import Collection
from statistics import median, median_low
from typing import Any

import torch
import torch.nn as nn

from runtime.log import logger
from runtime.together import everywhere

LIMIT, WINDOWS = 1.2, 3


class Stragglers:
    """Times the blocks' forwards in training, where no rank waits for another.

    Weights are gathered before a block's forward begins. Ranks that do wait for each other inside
    it, as those of one tensor parallel group do, are slow together.
    """

    def __init__(self, blocks: Collection[nn.Module], *, window: int, device: torch.device) -> None:
        """``blocks``: already sharded and, if ever, compiled. Adds hooks to them. A collective.

        ``window``: steps after which the ranks' times are compared.
        """
        self._window, self._steps, self._n_blocks = window, 0, len(blocks)
        self._clock = _DeviceClock() if device.type == "cuda" else _HostClock()
        self._seconds: list[float] = []
        self._hosts = everywhere(socket.gethostname())
        self._recent = deque[list[float]](maxlen=WINDOWS)
        self._named: set[int] = set()
        self._values: dict[str, float] = {}
        # The hooks of all blocks are the same objects, so that blocks share one compilation.
        start, stop = torch.compiler.disable(self._start), torch.compiler.disable(self._stop)
        for block in blocks:
            # After FSDP has gathered the block's weights, and before it frees them.
            block.register_forward_pre_hook(start)
            block.register_forward_hook(stop, prepend=True)
        logger.info("slow ranks: %d blocks are timed, in windows of %d steps", len(blocks), window)

    def finish_step(self) -> dict[str, float]:
        """For metrics: the last window's slowest rank, and its time over the median.

        {} before the first window is over. Logs, once, a rank that was above 1.2 times the median
        in each of the last three windows. A collective on the CPU at the end of a window; never
        waits for the device.
        """
        self._steps += 1
        self._seconds += self._clock.finish_step()
        if self._steps % self._window == 0:
            # Pipeline stages may have unequal numbers of equal blocks.
            times = everywhere(median(self._seconds) / self._n_blocks if self._seconds else 0.0)
            self._seconds = []
            # A rank whose device is many steps behind has no times yet.
            if min(times) > 0.0:
                self._compare(times)
        return dict(self._values)

    def _compare(self, times: list[float]) -> None:
        self._recent.append(times)
        ratios = _over_median(times)
        for rank in sorted(set(_slow_ranks(self._recent)) - self._named):
            logger.warning(
                "rank %d on %s is slow: its blocks take %.2f times the median of all ranks",
                rank, self._hosts[rank], ratios[rank],
            )  # fmt: skip
            self._named.add(rank)
        slowest = max(range(len(ratios)), key=ratios.__getitem__)
        self._values = {"slowest_rank": slowest, "slowest_over_median": ratios[slowest]}

    def _start(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled():
            self._clock.start()

    def _stop(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if torch.is_grad_enabled():
            self._clock.stop()


def _slow_ranks(windows: Collection[list[float]]) -> list[int]:
    """Ranks above ``LIMIT`` in each of ``WINDOWS`` windows."""
    if len(windows) < WINDOWS:
        return []
    ratios = zip(*map(_over_median, windows), strict=True)
    return [rank for rank, own in enumerate(ratios) if min(own) > LIMIT]


def _over_median(times: list[float]) -> list[float]:
    # The lower of two middle ones: half of the ranks may be slow.
    middle = median_low(times)
    return [time / middle for time in times]


class _HostClock:
    """Times intervals that follow each other, and adds up those of a step."""

    def __init__(self) -> None:
        self._begin, self._total = 0.0, 0.0

    def start(self) -> None:
        self._begin = time.perf_counter()

    def stop(self) -> None:
        self._total += time.perf_counter() - self._begin

    def finish_step(self) -> list[float]:
        total, self._total = self._total, 0.0
        return [total]


class _DeviceClock:
    """By events on the current stream, read once the device has passed them."""

    def __init__(self) -> None:
        self._pairs: list[_Pair] = []
        self._steps = deque[list[_Pair]]()
        self._unused: list[_Pair] = []

    def start(self) -> None:
        self._pairs.append(self._unused.pop() if self._unused else (_event(), _event()))
        self._pairs[-1][0].record()

    def stop(self) -> None:
        self._pairs[-1][1].record()

    def finish_step(self) -> list[float]:
        self._steps.append(self._pairs)
        self._pairs = []
        over = []
        while self._steps and self._steps[0][-1][1].query():
            pairs = self._steps.popleft()
            over.append(sum(begin.elapsed_time(end) for begin, end in pairs) / 1000.0)
            self._unused += pairs
        return over


_Pair = tuple[torch.cuda.Event, torch.cuda.Event]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
