"""Learning-rate schedule as a pure function of the step, without state to checkpoint."""

import math

from config.job_config import LrScheduler


def lr_factor(step: int, config: LrScheduler, total_steps: int) -> float:
    """Return the factor on the peak learning rate for optimizer step ``step``, 1-based.

    Linear warmup, then constant, then decay over the last ``decay_ratio`` of ``total_steps``, to
    ``min_lr_factor`` at the last step. Warmup is never cut short.
    """
    if step < config.warmup_steps:
        return step / config.warmup_steps
    start = max(config.warmup_steps, total_steps - round(config.decay_ratio * total_steps))
    if step <= start:
        return 1.0
    progress = (step - start) / (total_steps - start)
    remaining = _remaining(progress, config.decay_type)
    return config.min_lr_factor + (1.0 - config.min_lr_factor) * remaining


def _remaining(progress: float, decay_type: str) -> float:
    """Return the remaining share of the decay, from 1 at ``progress`` 0 to 0 at 1."""
    match decay_type:
        case "linear":
            return 1.0 - progress
        case "sqrt":
            return 1.0 - math.sqrt(progress)
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
    raise AssertionError(decay_type)
