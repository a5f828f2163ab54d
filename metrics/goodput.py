"""How much of a run's time is in the history that it has now."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any


def history_of(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the lines of ``metrics.jsonl``, those of training whose steps still count.

    What was made again, after a restart without a checkpoint or a rollback, replaces what was.
    """
    kept: list[dict[str, Any]] = []
    for line in lines:
        if "seconds_per_step" in line:
            while kept and kept[-1]["step"] >= line["step"]:
                kept.pop()
            kept.append(line)
    return kept


def goodput(lines: Sequence[dict[str, Any]], end: float) -> float | None:
    """The time of every step that counts, once, over the time from the first line to ``end``.

    None before there are two lines. The first line's own steps are on neither side. The rest of
    the time is steps that were made again or lost, restarts, saves and validation.
    """
    begins = [line["time"] for line in lines if "seconds_per_step" in line]
    history = history_of(lines)
    if len(history) < 2 or end <= begins[0]:
        return None
    # A line's speed is taken for all steps since the line before, also where a restart is between.
    pairs = pairwise(history)
    useful = sum(new["seconds_per_step"] * (new["step"] - old["step"]) for old, new in pairs)
    return useful / (end - begins[0])
