"""Memory of a rank that grows for as long as it trains: a leak, named before it ends the run."""

import socket
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from runtime.log import duration
from runtime.machine import host_memory_left, own_memory

# Growth counts if it lasts for this many blocks of steps, and is not less than this many bytes.
BLOCKS, MIN_RISE = 16, 64 * 2**20
# Least growth in the second half of them, over that in the first: a cache fills up ever slower.
STEADY = 0.75
# Blocks at the start in which caches fill up.
WARM_UP = 8
# Steps in a block of each scale over those of the scale below: a slow leak needs long blocks.
SCALE, SCALES = 4, 8
HOST, DEVICE = "host", "GPU"


@dataclass(frozen=True)
class Growth:
    """Steady growth of a value."""

    since: int
    """Step at which what is known of it begins."""
    rise: float
    per_step: float


class GrowthDetector:
    """Tells steady growth, whether fast or slow, from what comes and goes.

    Of each block of steps only the lowest value counts, so that a peak, and garbage that the next
    collection frees, are no growth. Keeps a bounded number of blocks.
    """

    def __init__(self, block_steps: int) -> None:
        self._block_steps, self._end, self._lowest = block_steps, 0, float("inf")
        self._n_blocks = 0
        self._scales = [deque[tuple[int, float]](maxlen=BLOCKS) for _ in range(SCALES)]

    def add(self, step: int, value: float) -> None:
        """Take the value after ``step``; steps ascend."""
        self._end = self._end or step + self._block_steps
        self._lowest = min(self._lowest, value)
        if step < self._end:
            return
        self._n_blocks += 1
        if self._n_blocks > WARM_UP:
            self._close(step)
        self._end, self._lowest = step + self._block_steps, float("inf")

    def _close(self, step: int) -> None:
        closed, count = (step, self._lowest), self._n_blocks - WARM_UP
        for blocks in self._scales:
            blocks.append(closed)
            if count % SCALE:
                return
            # One block of the next scale.
            closed, count = (step, min(low for _, low in list(blocks)[-SCALE:])), count // SCALE

    def growth(self) -> Growth | None:
        """Newest growth; None while there is none."""
        return next((found for blocks in self._scales if (found := _growth(blocks))), None)


def _growth(blocks: Sequence[tuple[int, float]]) -> Growth | None:
    """Growth in every one of ``blocks``, unless it slows down."""
    if len(blocks) < BLOCKS:
        return None
    steps, lows = zip(*blocks, strict=True)
    rises = [new - old for old, new in pairwise(lows)]
    first, second = sum(rises[: BLOCKS // 2]), sum(rises[BLOCKS // 2 :])
    if min(rises) <= 0 or first + second < MIN_RISE or second < STEADY * first:
        return None
    return Growth(steps[0], first + second, (first + second) / (steps[-1] - steps[0]))


class Leaks:
    """Watches the memory of this process on the host, and its tensors on a GPU."""

    def __init__(self, device: torch.device, *, block_steps: int) -> None:
        """``block_steps``: at least the steps between two garbage collections."""
        self._device, self._host = device, socket.gethostname()
        self._detectors = {HOST: GrowthDetector(block_steps)}
        if device.type == "cuda":
            self._detectors[DEVICE] = GrowthDetector(block_steps)

    def sample(self, step: int) -> dict[str, Any]:
        """Return what grows on this rank, for ``find_leak``: {} if nothing does."""
        found: dict[str, Any] = {}
        for kind, detector in self._detectors.items():
            used = own_memory() if kind == HOST else torch.cuda.memory_allocated(self._device)
            detector.add(step, used)
            if (growth := detector.growth()) is not None:
                left = host_memory_left() if kind == HOST else self._device_left(used)
                found[kind] = {"host": self._host, "growth": growth, "used": used, "left": left}
        return found

    def _device_left(self, used: float) -> float:
        return torch.cuda.get_device_properties(self._device).total_memory - used


@dataclass(frozen=True)
class Leak:
    """Memory that grows, on one or more ranks."""

    kind: str
    n_ranks: int
    rank: int
    """The one whose memory grows the fastest; what follows is its own."""
    host: str
    growth: Growth
    used: float
    left: float
    steps: float
    """Until nothing is left."""
    is_soon: bool
    """Nothing will be left before the run ends."""

    def text(self, seconds_per_step: float) -> str:
        """Return the line that names it."""
        others = f" and {self.n_ranks - 1} more" if self.n_ranks > 1 else ""
        end = f"full in about {self.steps:,.0f} steps ({duration(self.steps * seconds_per_step)})"
        hint = "; touch control/snapshot: which tensors" if self.kind == DEVICE else ""
        return (
            f"memory leak: {self.kind} memory of rank {self.rank} on {self.host}{others} grows by"
            f" {_size(self.growth.per_step)} per step: by {_size(self.growth.rise)} since step"
            f" {self.growth.since:,}, to {_size(self.used)}; {_size(self.left)} are left,"
            f" {end if self.is_soon else 'enough for the rest of the run'}{hint}"
        )


def find_leak(kind: str, ranks: Sequence[Mapping[str, Any]], steps_left: float) -> Leak | None:
    """Return the leak of a ``kind`` of memory, of what ``Leaks.sample`` returned on each rank."""
    leaks = {rank: each[kind] for rank, each in enumerate(ranks) if kind in each}
    if not leaks:
        return None
    rank = max(leaks, key=lambda r: leaks[r]["growth"].per_step)
    own = leaks[rank]
    # Ranks of one host share its memory.
    sharing = [each for each in leaks.values() if kind == HOST and each["host"] == own["host"]]
    steps = own["left"] / sum(each["growth"].per_step for each in sharing or [own])
    return Leak(kind, len(leaks), rank, **own, steps=steps, is_soon=steps < steps_left)


def _size(count: float) -> str:
    if count >= 2**30:
        return f"{count / 2**30:.2f} GiB"
    return f"{count / 2**20:.{0 if count >= 100 * 2**20 else 2}f} MiB"
