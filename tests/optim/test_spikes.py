"""A spike is far above the recent values, which are checkpointed."""

import json
import math
import random

import pytest

from config.job_config import Numerics
from optim.spikes import LossSpikeDetector

WINDOW = 16
CONFIG = Numerics(on_spike="rollback", spike_window=WINDOW, spike_sigmas=6.0, max_rollbacks=2)


def detector_after(losses: list[float], config: Numerics = CONFIG) -> LossSpikeDetector:
    detector = LossSpikeDetector(config)
    for step, loss in enumerate(losses, 1):
        assert not detector.is_spike(step, loss=loss, grad_norm=1.0)
    return detector


def noise(count: int, seed: int = 0, mean: float = 3.0, deviation: float = 0.1) -> list[float]:
    source = random.Random(seed)
    return [source.gauss(mean, deviation) for _ in range(count)]


def spike_threshold(losses: list[float]) -> float:
    """Loss above which a spike begins, by definition."""
    mean = sum(losses) / len(losses)
    variance = sum((loss - mean) ** 2 for loss in losses) / len(losses)
    return mean + CONFIG.spike_sigmas * math.sqrt(variance)


@pytest.mark.parametrize("count", [WINDOW // 2, WINDOW, 3 * WINDOW])
def test_spike_exceeds_mean_by_spike_sigmas(count: int) -> None:
    losses = noise(count)
    limit = spike_threshold(losses[-WINDOW:])
    assert not detector_after(losses).is_spike(count, loss=limit * (1 - 1e-9), grad_norm=1.0)
    assert detector_after(losses).is_spike(count, loss=limit * (1 + 1e-9), grad_norm=1.0)


def test_gradient_norm_can_spike() -> None:
    assert detector_after(noise(WINDOW)).is_spike(WINDOW, loss=3.0, grad_norm=2.0)


def test_no_spike_before_half_a_window() -> None:
    detector = detector_after(noise(WINDOW // 2 - 1))
    assert not detector.is_spike(1, loss=1e9, grad_norm=1e9)


def test_spike_does_not_enter_the_window() -> None:
    detector = detector_after(noise(WINDOW))
    before = detector.state_dict()
    assert detector.is_spike(1, loss=100.0, grad_norm=1.0)
    assert detector.state_dict() == before
    assert detector.is_spike(2, loss=100.0, grad_norm=1.0), "it would hide the next spike"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_value_is_no_spike_nor_history(value: float) -> None:
    detector = detector_after(noise(WINDOW))
    before = detector.state_dict()
    assert not detector.is_spike(1, loss=value, grad_norm=1.0)
    assert not detector.is_spike(2, loss=3.0, grad_norm=value)
    assert detector.state_dict() == before


def test_equal_values_allow_small_rises() -> None:
    for mean in (2.0, 1e-6):
        detector = detector_after([mean] * WINDOW)
        assert not detector.is_spike(1, loss=mean * 1.005, grad_norm=1.0)
        assert detector_after([mean] * WINDOW).is_spike(2, loss=mean * 1.007, grad_norm=1.0)


@pytest.mark.parametrize("slope", [-0.05, -0.01, 0.01, 0.05])
def test_drift_is_no_spike(slope: float) -> None:
    """The window follows up to half a deviation per step, up or down."""
    detector, losses = LossSpikeDetector(CONFIG), noise(120, mean=10.0)
    drifting = [loss + slope * step for step, loss in enumerate(losses)]
    assert not any(
        detector.is_spike(step, loss=x, grad_norm=1.0) for step, x in enumerate(drifting)
    )


def test_huge_values_do_not_raise() -> None:
    """Their squares overflow, so the deviation is infinite and nothing is a spike."""
    detector = detector_after([1e200, 3e200] * (WINDOW // 4))
    assert not detector.is_spike(1, loss=1e300, grad_norm=1.0)


def test_noise_is_no_spike_and_no_spike_is_missed(trials) -> None:
    config = CONFIG.model_copy(update={"spike_window": 128})
    for seed in range(trials(200)):
        detector = detector_after(noise(1000, seed), config)
        assert detector.is_spike(1, loss=3.0 + 10 * 0.1, grad_norm=1.0)


def decisions(detector: LossSpikeDetector, losses: list[float]) -> list[bool]:
    return [detector.is_spike(step, loss=x, grad_norm=1 / x) for step, x in enumerate(losses)]


@pytest.mark.parametrize("cut", [WINDOW // 2 - 1, WINDOW // 2, WINDOW, WINDOW + 5])
def test_resumed_run_makes_the_same_decisions(cut: int) -> None:
    losses = noise(4 * WINDOW, deviation=0.3)
    losses[cut + 1] = losses[cut + 2] = losses[3 * WINDOW] = 9.0
    uninterrupted, resumed, without_state = (LossSpikeDetector(CONFIG) for _ in range(3))
    assert not any(decisions(uninterrupted, losses[:cut]))
    uninterrupted.rollbacks = 1
    # The resumed run may have continued past the checkpoint before.
    decisions(resumed, losses[cut:])
    resumed.load_state_dict(json.loads(json.dumps(uninterrupted.state_dict())))
    assert resumed.state_dict() == uninterrupted.state_dict()
    want = decisions(uninterrupted, losses[cut:])
    assert [i for i, is_spike in enumerate(want) if is_spike] == [1, 2, 3 * WINDOW - cut]
    assert decisions(resumed, losses[cut:]) == want
    assert resumed.state_dict() == uninterrupted.state_dict()
    assert decisions(without_state, losses[cut:]) != want


@pytest.mark.parametrize("policy", ["ignore", "rollback"])
def test_enabled_only_with_rollback_policy(policy: str) -> None:
    assert LossSpikeDetector(Numerics(on_spike=policy)).enabled == (policy == "rollback")


def test_exhausted_after_max_rollbacks() -> None:
    detector = detector_after(noise(WINDOW))
    saved = detector.state_dict()
    for count in (1, 2):
        assert detector.is_spike(count, loss=100.0, grad_norm=1.0)
        assert not detector.exhausted
        # A rollback restores the windows and keeps the count.
        detector.rollbacks += 1
        detector.load_state_dict(saved)
        assert detector.rollbacks == count
    assert detector.exhausted
