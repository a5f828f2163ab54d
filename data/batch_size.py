"""Batch size ramp: the global batch size is a function of the step alone, so it has no state.

Source: arXiv 2005.14165, section 2.3. Megatron-LM calls it rampup, arXiv 2505.23971 batch size
warmup. Small batches are enough early in training, because gradients are then large compared to
their noise (arXiv 1812.06162).
"""

from collections.abc import Sequence

Ramp = Sequence[Sequence[int]]
"""Phases in order, each (steps, sequences per step)."""


def batch_size_of(step: int, ramp: Ramp, final: int) -> int:
    """Global batch size of ``step`` (from 1), in sequences; ``final`` after the ramp."""
    return sequences_in(step, ramp, final) - sequences_in(step - 1, ramp, final)


def sequences_in(steps: int, ramp: Ramp, final: int) -> int:
    """Total number of sequences in the first ``steps`` steps."""
    total = 0
    for length, size in ramp:
        total += min(length, steps) * size
        steps -= min(length, steps)
    return total + steps * final
