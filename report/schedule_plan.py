"""Learning rate and batch size of a run's steps, computed from its configuration alone."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from config.job_config import LrScheduler, Training
from data.batch_size import batch_size_of, sequences_in
from optim.schedule import lr_factor

# Of the plan, besides those where a phase begins or ends.
MAX_STEPS = 1000


@dataclass(frozen=True)
class SchedulePlan:
    """Values after each of ``steps``, which include every step where a phase begins or ends."""

    steps: list[int]
    lr: list[float]
    """Empty if a function of the user's own decides it."""
    batch_tokens: list[int]
    """Tokens per step, padding included."""
    tokens: list[int]
    """Tokens of all steps so far, padding included."""


def plan_schedule(
    training: Training,
    lr_scheduler: LrScheduler,
    peak_lr: float,
    *,
    factor: Callable[[int], float] | None = None,
) -> SchedulePlan:
    """Plan a run from a resolved configuration.

    ``factor``: of the peak learning rate by step, for a function of the user's own, which this does
    not import.
    Raises ``ValueError`` without ``training.global_batch_size``, which follows from the number of
    ranks, and with more than ``MAX_STEPS`` phases.
    """
    batch_size = training.global_batch_size
    if batch_size is None:
        raise ValueError("training.global_batch_size: absent, so the batch depends on the ranks")
    if len(training.batch_size_ramp) > MAX_STEPS:
        raise ValueError(f"training.batch_size_ramp: more than {MAX_STEPS:,} phases")
    n_steps, ramp = (
        training.steps,
        [(p.steps, p.global_batch_size) for p in training.batch_size_ramp],
    )
    total = lr_scheduler.total_steps or n_steps
    if factor is None and not lr_scheduler.is_outside:
        factor = partial(lr_factor, config=lr_scheduler, total_steps=total)
    bounds = [1, n_steps, lr_scheduler.warmup_steps]
    bounds.append(total - round(lr_scheduler.decay_ratio * total))
    end = 0
    for length, _ in ramp:
        end += length
        bounds += [end, end + 1]
    even = (1 + i * (n_steps - 1) // MAX_STEPS for i in range(MAX_STEPS + 1))
    steps = sorted({step for step in (*bounds, *even) if 1 <= step <= n_steps})
    return SchedulePlan(
        steps,
        [peak_lr * factor(step) for step in steps] if factor is not None else [],
        [batch_size_of(step, ramp, batch_size) * training.seq_len for step in steps],
        [sequences_in(step, ramp, batch_size) * training.seq_len for step in steps],
    )
