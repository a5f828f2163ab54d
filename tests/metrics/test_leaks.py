"""Memory that grows steadily is a leak, whether fast or slow; what comes and goes is none."""

import itertools
import math
import random
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch

from metrics import leaks
from metrics.leaks import (
    BLOCKS,
    DEVICE,
    HOST,
    MIN_RISE,
    WARM_UP,
    Growth,
    GrowthDetector,
    Leaks,
    find_leak,
)

MIB = 2.0**20
GC_FREQ = 50


def found_at(memory: Callable[[int], float], n_steps: int, log_freq: int = 10) -> int | None:
    """First logged step at which ``memory``, in MiB after each step, is taken for a leak."""
    detector = GrowthDetector(GC_FREQ)
    for step in itertools.chain([1], range(log_freq, n_steps + 1, log_freq)):
        detector.add(step, MIB * memory(step))
        if detector.growth() is not None:
            return step
    return None


@pytest.mark.parametrize("per_step", [30.0, 1.0, 0.1, 0.01])
def test_leak_is_found_whatever_its_rate(per_step: float) -> None:
    noise = random.Random(0)
    step = found_at(lambda step: 900 + per_step * step + noise.uniform(0, 3), 100_000)
    assert step is not None
    # As soon as its growth counts, and there are enough blocks; up to a scale later.
    least = max((BLOCKS + WARM_UP) * GC_FREQ, MIN_RISE / MIB / per_step)
    assert least <= step <= 4 * least + BLOCKS * GC_FREQ


def test_leak_that_begins_late_is_found() -> None:
    step = found_at(lambda step: 900 + max(0, step - 60_000), 100_000)
    assert step is not None
    assert 60_000 < step <= 60_000 + (BLOCKS + 1) * GC_FREQ


@pytest.mark.parametrize(
    "memory",
    [
        lambda step: 900,
        lambda step: 900 + random.Random(step).gauss(0, 50),
        # Caches that fill up, at once and slowly.
        lambda step: 900 + 400 * min(1.0, step / 300),
        lambda step: 900 + 400 * (1 - math.exp(-step / 500)),
        # Garbage that waits for the next collection; a peak in each validation.
        lambda step: 900 + 20 * (step % GC_FREQ),
        lambda step: 900 + 800 * (step % 1000 < 10),
        # Peaks that grow, at the last steps of blocks.
        lambda step: 900 + 0.1 * step * (step % GC_FREQ == 10),
        # Now and then a larger batch, and a growth that the run never notices.
        lambda step: 900 + 500 * (step // 20_000),
        lambda step: 900 + 0.0005 * step,
    ],
)
def test_what_is_no_leak_is_none(memory: Callable[[int], float]) -> None:
    assert found_at(memory, 100_000) is None


def test_rate_and_rise_are_those_of_the_newest_blocks() -> None:
    detector = GrowthDetector(1)
    for step in range(1, 200):
        detector.add(step, 8.0 * MIB * step)
    growth = detector.growth()
    assert growth is not None
    assert growth.per_step == pytest.approx(8.0 * MIB)
    assert growth.rise == pytest.approx(8.0 * MIB * (BLOCKS - 1))
    assert growth.since == 199 - BLOCKS + 1


def leaking(per_step: float, *, host: str = "a", left: float = 1000.0) -> dict:
    growth = Growth(24, 15 * per_step * MIB, per_step * MIB)
    return {"host": host, "growth": growth, "used": 900 * MIB, "left": left * MIB}


def test_ranks_of_a_host_fill_it_together() -> None:
    ranks = [{HOST: leaking(4.0)}, {}, {HOST: leaking(5.0)}, {HOST: leaking(3.0, host="b")}]
    leak = find_leak(HOST, ranks, steps_left=200.0)
    assert leak is not None
    assert leak.text(0.5) == (
        "memory leak: host memory of rank 2 on a and 2 more grows by 5.00 MiB per step: by 75.00"
        " MiB since step 24, to 900 MiB; 1000 MiB are left, full in about 111 steps (0:00:56)"
    )
    assert find_leak(DEVICE, ranks, steps_left=200.0) is None
    late = find_leak(HOST, ranks, steps_left=100.0)
    assert late is not None
    assert late.text(0.5).endswith("1000 MiB are left, enough for the rest of the run")


def test_ranks_do_not_share_gpus() -> None:
    leak = find_leak(DEVICE, [{DEVICE: leaking(5.0)}, {DEVICE: leaking(4.0)}], steps_left=1000.0)
    assert leak is not None
    assert "full in about 200 steps" in leak.text(1.0)
    assert "control/snapshot" in leak.text(1.0)


def test_tensors_of_a_gpu_are_watched_too() -> None:
    watch = Leaks(torch.device("cuda"), block_steps=1)
    used = (8 * MIB * step for step in itertools.count(1))
    total = type("Properties", (), {"total_memory": 1000 * MIB})
    found = {}
    with (
        patch.object(leaks, "own_memory", lambda: 900),
        patch.object(torch.cuda, "memory_allocated", lambda device: next(used)),
        patch.object(torch.cuda, "get_device_properties", lambda device: total),
    ):
        for step in range(1, BLOCKS + WARM_UP + 3):
            found = watch.sample(step)
    assert list(found) == [DEVICE]
    assert found[DEVICE]["left"] + found[DEVICE]["used"] == 1000 * MIB
