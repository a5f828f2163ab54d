"""The global batch size as a function of the step alone: nothing to save, nothing to restore.

A ramp of the batch size (arXiv 2005.14165, section 2.3), which Megatron-LM calls rampup and
arXiv 2505.23971 batch size warmup: early in training small batches are enough, because the noise of
their gradients is small beside the gradients themselves (arXiv 1812.06162).
"""

from collections.abc import Sequence

Ramp = Sequence[Sequence[int]]
"""Phases in order, each (steps, sequences per step)."""


def batch_size_of(step: int, ramp: Ramp, final: int) -> int:
    """Sequences of step ``step`` (1-based); ``final`` after the ramp."""
    return sequences_in(step, ramp, final) - sequences_in(step - 1, ramp, final)


def sequences_in(steps: int, ramp: Ramp, final: int) -> int:
    """Sequences of the first ``steps`` steps together."""
    total = 0
    for length, size in ramp:
        total += min(length, steps) * size
        steps -= min(length, steps)
    return total + steps * final
