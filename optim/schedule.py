"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

import math

from config.job_config import LrScheduler


def lr_factor(step: int, config: LrScheduler, total_steps: int) -> float:
    """The share of the peak learning rate that update ``step`` (1-based) uses.

    Linear warmup, then flat, then a decay over the last ``decay_ratio`` of ``total_steps`` (warmup
    is never cut short) down to ``min_lr_factor`` at the last step, after which there is none.
    """
    if step < config.warmup_steps:
        return step / config.warmup_steps
    start = max(config.warmup_steps, total_steps - round(config.decay_ratio * total_steps))
    if step <= start:
        return 1.0
    progress = (step - start) / (total_steps - start)
    left = _left(progress, config.decay_type)
    return config.min_lr_factor + (1.0 - config.min_lr_factor) * left


def _left(progress: float, decay_type: str) -> float:
    """How much of the way down is left, from 1 to 0."""
    match decay_type:
        case "linear":
            return 1.0 - progress
        case "sqrt":
            return 1.0 - math.sqrt(progress)
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
    raise AssertionError(decay_type)
