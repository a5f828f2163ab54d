"""A loss that diverges: above its best for so long that it is no spike."""

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

from metrics.history import Line, split_history

# Logged losses that are compared, and by how much each of the newest ones is above the best: as a
# part of it, and in nats per token.
WINDOW, RELATIVE_RISE, RISE = 20, 0.2, 0.1


class Divergence:
    """Follows the logged losses of a run.

    The best is the lowest median of ``WINDOW`` consecutive losses, fewer at the start. The loss
    diverges while all of the newest ``WINDOW`` losses are well above it. A spike that ends, noise
    and a plateau are not such.
    """

    def __init__(self) -> None:
        self._recent = deque[tuple[int, float]](maxlen=WINDOW)
        self._best, self._best_step = math.inf, 0

    def add_history(self, lines: Iterable[Line]) -> None:
        """Add the losses of ``metrics.jsonl`` that no restart and no rollback undid."""
        for line in split_history(lines).training:
            if line["loss"] is not None:
                self.add(line["step"], line["loss"])

    def add(self, step: int, loss: float) -> str:
        """Return how the loss diverges, "" if it does not. Nonfinite losses do not count."""
        if not math.isfinite(loss):
            return ""
        self._recent.append((step, loss))
        losses = [loss for _, loss in self._recent]
        if (middle := median(losses)) < self._best:
            self._best, self._best_step = middle, step
        rise = max(RISE, RELATIVE_RISE * abs(self._best))
        if len(losses) < WINDOW or min(losses) <= self._best + rise:
            return ""
        return (
            f"the loss diverges: {middle:.4g} from step {self._recent[0][0]:,} on, after"
            f" {self._best:.4g} up to step {self._best_step:,} (medians); lower optimizer.lr, or"
            ' set numerics.on_spike = "rollback"'
        )
