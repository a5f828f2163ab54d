"""A spike is far above the recent values; what it is compared with survives a checkpoint."""

import json
import math
import random

import pytest

from config.job_config import Numerics
from optim.spikes import SpikeGuard

WINDOW = 16
CONFIG = Numerics(on_spike="rollback", spike_window=WINDOW, spike_sigmas=6.0, max_rollbacks=2)


def guard_after(losses: list[float], config: Numerics = CONFIG) -> SpikeGuard:
    guard = SpikeGuard(config)
    for step, loss in enumerate(losses, 1):
        assert not guard.is_spike(step, loss=loss, grad_norm=1.0)
    return guard


def noise(count: int, seed: int = 0, mean: float = 3.0, deviation: float = 0.1) -> list[float]:
    source = random.Random(seed)
    return [source.gauss(mean, deviation) for _ in range(count)]


def bound(losses: list[float]) -> float:
    """What a loss must be above, by the definition."""
    mean = sum(losses) / len(losses)
    variance = sum((loss - mean) ** 2 for loss in losses) / len(losses)
    return mean + CONFIG.spike_sigmas * math.sqrt(variance)


@pytest.mark.parametrize("count", [WINDOW // 2, WINDOW, 3 * WINDOW])
def test_a_spike_is_more_than_so_many_deviations_above_the_window(count: int) -> None:
    losses = noise(count)
    limit = bound(losses[-WINDOW:])
    assert not guard_after(losses).is_spike(count, loss=limit * (1 - 1e-9), grad_norm=1.0)
    assert guard_after(losses).is_spike(count, loss=limit * (1 + 1e-9), grad_norm=1.0)


def test_the_gradient_norm_counts_too() -> None:
    assert guard_after(noise(WINDOW)).is_spike(WINDOW, loss=3.0, grad_norm=2.0)


def test_before_half_a_window_nothing_is_a_spike() -> None:
    guard = guard_after(noise(WINDOW // 2 - 1))
    assert not guard.is_spike(1, loss=1e9, grad_norm=1e9)


def test_a_spike_does_not_enter_the_window() -> None:
    guard = guard_after(noise(WINDOW))
    before = guard.state_dict()
    assert guard.is_spike(1, loss=100.0, grad_norm=1.0)
    assert guard.state_dict() == before
    assert guard.is_spike(2, loss=100.0, grad_norm=1.0), "it would hide the next one"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_no_spike_and_no_history(value: float) -> None:
    guard = guard_after(noise(WINDOW))
    before = guard.state_dict()
    assert not guard.is_spike(1, loss=value, grad_norm=1.0)
    assert not guard.is_spike(2, loss=3.0, grad_norm=value)
    assert guard.state_dict() == before


def test_equal_values_allow_small_rises() -> None:
    for mean in (2.0, 1e-6):
        guard = guard_after([mean] * WINDOW)
        assert not guard.is_spike(1, loss=mean * 1.005, grad_norm=1.0)
        assert guard_after([mean] * WINDOW).is_spike(2, loss=mean * 1.007, grad_norm=1.0)


@pytest.mark.parametrize("slope", [-0.05, -0.01, 0.01, 0.05])
def test_a_drift_is_no_spike(slope: float) -> None:
    """Half a deviation per step, up or down: the window follows."""
    guard, losses = SpikeGuard(CONFIG), noise(120, mean=10.0)
    drifting = [loss + slope * step for step, loss in enumerate(losses)]
    assert not any(guard.is_spike(step, loss=x, grad_norm=1.0) for step, x in enumerate(drifting))


def test_huge_values_do_no_harm() -> None:
    """Their squares overflow: the deviation is infinite, and nothing is far above."""
    guard = guard_after([1e200, 3e200] * (WINDOW // 4))
    assert not guard.is_spike(1, loss=1e300, grad_norm=1.0)


def test_noise_makes_no_alarms_and_no_spike_is_missed(trials) -> None:
    config = CONFIG.model_copy(update={"spike_window": 128})
    for seed in range(trials(200)):
        guard = guard_after(noise(1000, seed), config)
        assert guard.is_spike(1, loss=3.0 + 10 * 0.1, grad_norm=1.0)


def decisions(guard: SpikeGuard, losses: list[float]) -> list[bool]:
    return [guard.is_spike(step, loss=x, grad_norm=1 / x) for step, x in enumerate(losses)]


@pytest.mark.parametrize("cut", [WINDOW // 2 - 1, WINDOW // 2, WINDOW, WINDOW + 5])
def test_a_resumed_run_decides_the_same(cut: int) -> None:
    losses = noise(4 * WINDOW, deviation=0.3)
    losses[cut + 1] = losses[cut + 2] = losses[3 * WINDOW] = 9.0
    straight, resumed, forgetful = (SpikeGuard(CONFIG) for _ in range(3))
    assert not any(decisions(straight, losses[:cut]))
    straight.rollbacks = 1
    # It may have gone on from there before, and come back.
    decisions(resumed, losses[cut:])
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    assert resumed.state_dict() == straight.state_dict()
    want = decisions(straight, losses[cut:])
    assert [i for i, is_spike in enumerate(want) if is_spike] == [1, 2, 3 * WINDOW - cut]
    assert decisions(resumed, losses[cut:]) == want
    assert resumed.state_dict() == straight.state_dict()
    assert decisions(forgetful, losses[cut:]) != want


@pytest.mark.parametrize("policy", ["ignore", "rollback"])
def test_only_who_asks_has_spikes(policy: str) -> None:
    assert SpikeGuard(Numerics(on_spike=policy)).is_on == (policy == "rollback")


def test_one_rollback_too_many_is_over() -> None:
    guard = guard_after(noise(WINDOW))
    saved = guard.state_dict()
    for count in (1, 2):
        assert guard.is_spike(count, loss=100.0, grad_norm=1.0)
        assert not guard.is_over
        # A rollback brings back the windows, and does not undo the count.
        guard.rollbacks += 1
        guard.load_state_dict(saved)
        assert guard.rollbacks == count
    assert guard.is_over
