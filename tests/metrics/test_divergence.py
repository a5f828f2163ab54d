"""A loss that rises above its best and stays there diverges; spikes, noise and plateaus do not."""

import math
import random
from collections.abc import Callable

import pytest

from metrics.divergence import WINDOW, Divergence


def found(loss: Callable[[int], float], n_steps: int = 1000) -> tuple[int, str] | None:
    divergence = Divergence()
    for step in range(1, n_steps + 1):
        if text := divergence.add(step, loss(step)):
            return step, text
    return None


def falling(step: int) -> float:
    return 2.0 + 8.0 * math.exp(-step / 50) + random.Random(step).gauss(0, 0.05)


@pytest.mark.parametrize(("begin", "rise"), [(30, 5.0), (300, 0.6), (300, 2.0), (300, 100.0)])
def test_rise_that_lasts_is_found_after_a_window(begin: int, rise: float) -> None:
    step, text = found(lambda step: falling(min(step, begin)) + rise * (step > begin)) or (0, "")
    assert begin + WINDOW <= step <= begin + WINDOW + 1
    assert f"from step {step - WINDOW + 1} on" in text
    assert "optimizer.lr" in text


def test_loss_that_never_falls_below_the_first_is_found() -> None:
    step, text = found(lambda step: 6.4 + min(step - 1, 10)) or (0, "")
    assert step <= 1 + WINDOW + 2
    assert "after 6.4 up to step 1" in text


def test_losses_that_a_restart_undid_do_not_count() -> None:
    dead = [{"step": step, "loss": 1.0} for step in range(1, 2 * WINDOW)]
    lines = [*dead, *({"step": step, "loss": 2.0} for step in (1, 2))]
    divergence = Divergence()
    divergence.add_history([*lines, {"step": 3, "loss": None}])
    assert [divergence.add(step, 2.0) for step in range(4, 2 * WINDOW)] == [""] * (2 * WINDOW - 4)
    divergence.add_history([{"step": step, "loss": 1.0} for step in range(100, 200)])
    assert "after 1 up to step" in [divergence.add(step, 2.0) for step in range(200, 230)][-1]


@pytest.mark.parametrize(
    "loss",
    [
        falling,
        # A spike that ends within the window, and a slow recovery that begins in it.
        lambda step: falling(step) + 5.0 * (300 <= step < 300 + WINDOW - 1),
        lambda step: falling(step) + 5.0 * (step >= 300) * math.exp(-(step - 300) / 6),
        # Much noise, a plateau, a rise of 10 %.
        lambda step: 3.0 + random.Random(step).gauss(0, 0.8),
        lambda step: falling(min(step, 200)),
        lambda step: falling(step) + 0.2 * (step > 300),
        # Memorized: the noise is a large part of the loss.
        lambda step: 0.01 + random.Random(step).uniform(0, 0.05) * (step > 300),
        # Nonfinite losses have a policy of their own.
        lambda step: math.nan if step > 300 else falling(step),
        lambda step: math.inf if step > 300 else falling(step),
    ],
)
def test_what_does_not_diverge(loss: Callable[[int], float]) -> None:
    assert found(loss) is None
