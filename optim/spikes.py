"""Spikes: a loss or gradient norm far above the recent ones (OLMo-core's SkipStepOptimizer)."""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from config.job_config import Numerics
from runtime.log import logger

# As a share of the mean: without it, any rise after equal values would be a spike.
MIN_DEVIATION = 1e-3


class SpikeGuard:
    """Remembers recent losses and gradient norms, and how often the run was rolled back.

    Ranks that give it the same values get the same answers. It needs them on the host every step.
    """

    def __init__(self, config: Numerics) -> None:
        self._config = config
        self._windows = {
            name: deque[float](maxlen=config.spike_window) for name in ("loss", "gradient norm")
        }
        self.rollbacks = 0
        """Rollbacks of the run so far; the caller, who rolls back, counts them."""

    @property
    def is_on(self) -> bool:
        return self._config.on_spike == "rollback"

    @property
    def is_over(self) -> bool:
        """Whether a spike now is one too many to roll back again."""
        return self.rollbacks >= self._config.max_rollbacks

    def is_spike(self, step: int, *, loss: float, grad_norm: float) -> bool:
        """Whether either value is more than ``spike_sigmas`` above the mean of its window.

        Never before the windows are half full. What is a spike is logged, and does not enter the
        windows; neither does what is not finite, which ``NonfiniteGuard`` handles.
        """
        values = {"loss": loss, "gradient norm": grad_norm}
        if not all(map(math.isfinite, values.values())):
            return False
        found = [text for name, value in values.items() if (text := self._spike(name, value))]
        if found:
            logger.warning("step %d: a spike: %s", step, ", ".join(found))
            return True
        for name, value in values.items():
            self._windows[name].append(value)
        return False

    def _spike(self, name: str, value: float) -> str:
        """What is wrong with ``value``; "" is nothing."""
        window = self._windows[name]
        if 2 * len(window) < self._config.spike_window:
            return ""
        mean = sum(window) / len(window)
        variance = sum((past - mean) * (past - mean) for past in window) / len(window)
        deviation = max(math.sqrt(variance), MIN_DEVIATION * mean)
        if value <= mean + self._config.spike_sigmas * deviation:
            return ""
        return f"the {name} {value:.4g} is far above {mean:.4g} (deviation {deviation:.2g})"

    def state_dict(self) -> dict[str, Any]:
        return {
            "losses": list(self._windows["loss"]),
            "grad_norms": list(self._windows["gradient norm"]),
            "count": self.rollbacks,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Windows of the checkpoint's step. The count never goes back: a rollback loads it too."""
        for name, key in (("loss", "losses"), ("gradient norm", "grad_norms")):
            self._windows[name].clear()
            self._windows[name].extend(state_dict[key])
        self.rollbacks = max(self.rollbacks, state_dict["count"])
