"""Goodput: the fraction of a run's time spent in steps that still count."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from metrics.history import split_history


def goodput(lines: Sequence[dict[str, Any]], end: float) -> float | None:
    """Return the time of all steps that count over the time from the first line to ``end``.

    ``lines`` have times; ``end``: Unix time in seconds, the last line's if that is later. None with
    fewer than two lines of training. Steps before the first of those do not count. All other time
    is repeated or lost steps, restarts, checkpoints and validation.
    """
    training = split_history(lines).training
    history = [line for line in training if line.get("seconds_per_step") is not None]
    if len(history) < 2:
        return None
    # The time of a failure is in whole seconds.
    seconds = max(end, lines[-1]["time"]) - lines[0]["time"]
    pairs = pairwise(history)
    useful = sum(_seconds_per_step(old, new) * (new["step"] - old["step"]) for old, new in pairs)
    # The clock may have been set back.
    return useful / seconds if seconds > 0 else None


def _seconds_per_step(old: dict[str, Any], new: dict[str, Any]) -> float:
    """Speed of the steps after the line ``old`` up to ``new``, even across a restart."""
    seconds: list[float] = [new["seconds_per_step"]]
    if new.get("restarts") != old.get("restarts"):
        # The new line may be of one step, which compiled.
        seconds.append(old["seconds_per_step"])
    return min(seconds)
