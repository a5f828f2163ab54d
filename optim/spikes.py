"""Detect spikes of the loss and gradient norm (as OLMo-core's SkipStepOptimizer)."""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from config.job_config import Numerics
from runtime.log import logger

# Fraction of the mean: without this minimum, any rise after equal values would be a spike.
MIN_DEVIATION = 1e-3


class LossSpikeDetector:
    """Compares the loss and gradient norm with those of recent steps; counts rollbacks.

    Ranks that pass the same values get the same answers. The values must be on the host each step.
    """

    def __init__(self, config: Numerics) -> None:
        self._config = config
        self._windows = {
            name: deque[float](maxlen=config.spike_window) for name in ("loss", "gradient norm")
        }
        self.rollbacks = 0
        """Rollbacks of the run so far, counted by the caller."""

    @property
    def enabled(self) -> bool:
        return self._config.on_spike == "rollback"

    @property
    def exhausted(self) -> bool:
        """True if the run has used all of its rollbacks."""
        return self.rollbacks >= self._config.max_rollbacks

    def is_spike(self, step: int, *, loss: float, grad_norm: float) -> bool:
        """True if either value is more than ``spike_sigmas`` above the mean of its window.

        False until the windows are half full. Logs a spike. Neither spikes nor nonfinite values,
        which ``NonfiniteGuard`` handles, enter the windows.
        """
        values = {"loss": loss, "gradient norm": grad_norm}
        if not all(map(math.isfinite, values.values())):
            return False
        spikes = [text for name, value in values.items() if (text := self._describe(name, value))]
        if spikes:
            logger.warning("step %d: spike: %s", step, ", ".join(spikes))
            return True
        for name, value in values.items():
            self._windows[name].append(value)
        return False

    def _describe(self, name: str, value: float) -> str:
        """Return a description of the spike; "" if ``value`` is none."""
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
        """Restore the windows; keep the larger count, because a rollback also loads a state."""
        for name, key in (("loss", "losses"), ("gradient norm", "grad_norms")):
            self._windows[name].clear()
            self._windows[name].extend(state_dict[key])
        self.rollbacks = max(self.rollbacks, state_dict["count"])
