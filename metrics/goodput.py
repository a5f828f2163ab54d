"""How much of a run's time went into the steps that still count."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any


def history_of(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl`` that are about training, and whose steps still count.

    Steps made again, after a restart without a checkpoint or a rollback, replace the earlier ones.
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
