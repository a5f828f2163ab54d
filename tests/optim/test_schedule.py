import math
from itertools import pairwise

import pytest

from config.job_config import LrScheduler
from optim.schedule import lr_factor

WSD = LrScheduler(warmup_steps=10, decay_ratio=0.2, decay_type="linear", min_lr_factor=0.1)
SHAPES = {
    "linear": lambda progress: 1 - progress,
    "sqrt": lambda progress: 1 - progress**0.5,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
}


def curve(config: LrScheduler, total_steps: int) -> list[float]:
    """The factors of steps 1, 2, ..."""
    return [lr_factor(step, config, total_steps) for step in range(1, total_steps + 1)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("warmup", [0, 1, 10])
@pytest.mark.parametrize("decay_ratio", [0.0, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_curve_is_warmup_then_constant_then_decay(
    shape: str, warmup: int, decay_ratio: float, floor: float
) -> None:
    # Of these ratios only 0 and 1 give whole steps, and one is rounded up.
    total = 113
    config = LrScheduler(
        warmup_steps=warmup, decay_ratio=decay_ratio, decay_type=shape, min_lr_factor=floor
    )
    start = max(warmup, total - round(decay_ratio * total))
    up = [step / warmup for step in range(1, warmup + 1)]
    flat = [1.0] * (start - warmup)
    down = [
        floor + (1 - floor) * SHAPES[shape](i / (total - start))
        for i in range(1, total - start + 1)
    ]
    factors = curve(config, total)
    assert factors == pytest.approx(up + flat + down, abs=1e-12)
    assert factors[-1] == pytest.approx(floor if decay_ratio else 1.0)
    # No step is steeper than the steepest one of the shape.
    steepest = {"linear": 1.0, "sqrt": math.sqrt(total - start), "cosine": math.pi / 2}[shape]
    limit = max(1 / max(1, warmup), steepest / max(1, total - start))
    assert max(abs(a - b) for a, b in pairwise(factors)) <= limit + 1e-12


def test_more_total_steps_only_move_the_decay() -> None:
    """Warmup-stable-decay: a run can be extended from before its decay."""
    assert curve(WSD, 200)[:80] == curve(WSD, 100)[:80]
    assert curve(WSD, 200)[80:160] == [1.0] * 80


def test_warmup_is_never_cut_short() -> None:
    config = LrScheduler(warmup_steps=50, decay_ratio=1.0)
    assert curve(config, 20) == [step / 50 for step in range(1, 21)]
