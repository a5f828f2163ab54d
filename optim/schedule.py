"""Learning-rate schedule as a pure function of the step, without state to checkpoint."""

import math
from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any

from config import ConfigError
from config.constraints import is_set
from config.job_config import LrScheduler
from runtime.log import logger
from runtime.outside import Signature, describe_error, import_attribute

# Keys that a function outside gets if it has a parameter of that name.
SHAPE_KEYS = ("warmup_steps", "decay_ratio", "min_lr_factor")
# Steps at which a function outside is tried before the run.
TRIED_STEPS = 1000


def build_lr_schedule(config: LrScheduler, total_steps: int) -> Callable[[int], float]:
    """Return the factor on the peak learning rate as a function of the optimizer step, 1-based.

    Raises ``ValueError`` for a function outside that cannot be one; the result, for a factor that
    is negative or not finite.
    """
    if not config.is_outside:
        if config.warmup_steps > total_steps:
            logger.warning(
                "lr_scheduler.warmup_steps (%d) > total_steps (%d): lr peaks at %.0f %% of its"
                " value", config.warmup_steps, total_steps, 100 * total_steps / config.warmup_steps,
            )  # fmt: skip
        return partial(lr_factor, config=config, total_steps=total_steps)
    factor = _outside_schedule(config, total_steps)
    steps = [*range(1, total_steps, -(-total_steps // TRIED_STEPS)), total_steps]
    forward = [factor(step) for step in steps]
    # In another order, because a pure function has no memory.
    for step, first in zip(reversed(steps), reversed(forward), strict=True):
        again = factor(step)
        if again != first:
            text = f"gives {first} and then {again} for step {step}: it must depend on nothing else"
            raise ConfigError([f"lr_scheduler.decay_type: {config.decay_type!r} {text}"])
    return factor


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


def _outside_schedule(config: LrScheduler, total_steps: int) -> Callable[[int], float]:
    """Import the function that ``decay_type`` names, and bind its arguments."""
    name = config.decay_type
    function = import_attribute("lr_scheduler.decay_type", name)
    signature = Signature("lr_scheduler.decay_type", name, function, n_leading=2)
    shape = {key: getattr(config, key) for key in SHAPE_KEYS if signature.names(key)}
    for key in SHAPE_KEYS:
        if key not in shape and is_set(config, key):
            text = f"has no effect: remove it, or give {name} an argument of this name"
            raise ConfigError([f"lr_scheduler.{key}: {text}"])
    set_by = {key: f"lr_scheduler.{key}" for key in shape}
    arguments = shape | signature.bind("lr_scheduler.args", config.args, set_by=set_by)

    def factor(step: int) -> float:
        value: Any = None
        try:
            value = function(step, total_steps, **arguments)
        except Exception as error:
            problem = describe_error(error)
        else:
            number = float(value) if isinstance(value, Real) else math.nan
            if math.isfinite(number) and number >= 0:
                return number
            problem = f"{value!r} is not a factor of 0 or more"
        raise ConfigError([f"lr_scheduler.decay_type: {name!r} at step {step}: {problem}"])

    return factor
