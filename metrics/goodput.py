"""Goodput: the fraction of a run's time spent in steps that still count."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any


def history_of(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the training lines of ``metrics.jsonl`` whose steps still count.

    Steps repeated after a restart or a rollback replace the earlier ones.
    """
    kept: list[dict[str, Any]] = []
    for line in lines:
        if line.get("seconds_per_step") is not None:
            while kept and kept[-1]["step"] >= line["step"]:
                kept.pop()
            kept.append(line)
    return kept


def goodput(lines: Sequence[dict[str, Any]], end: float) -> float | None:
    """Return the time of all steps that count over the time from the first line to ``end``.

    ``end``: Unix time in seconds. None with fewer than two lines. Excludes the steps before the
    first line. All other time is repeated or lost steps, restarts, checkpoints and validation.
    """
    times = [line["time"] for line in lines if line.get("seconds_per_step") is not None]
    history = history_of(lines)
    if len(history) < 2 or end <= times[0]:
        return None
    # A line's speed applies to all steps since the previous line, even across a restart.
    pairs = pairwise(history)
    useful = sum(new["seconds_per_step"] * (new["step"] - old["step"]) for old, new in pairs)
    return useful / (end - times[0])
