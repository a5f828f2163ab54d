"""Lines of metrics.jsonl as curves, each of a bounded number of points.

A point stands for consecutive lines, with their mean, lowest and highest value: whatever the length
of a run, no spike is lost.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from metrics.history import Line

MAX_POINTS, MAX_UNDONE = 4000, 20
# Keys that place a line, and are no curves.
PLACE = {"step", "time", "restarts", "tokens"}


@dataclass(frozen=True)
class Axis:
    """Places of points: of the last line that each stands for."""

    steps: list[int]
    tokens: list[float] | None
    """Tokens trained on; None if no line says."""
    seconds: list[float] | None
    """Seconds since the run's first line, not descending; None if no line says."""


@dataclass(frozen=True)
class Points:
    """Values of points, None where no line has one."""

    mean: list[float | None]
    low: list[float | None]
    high: list[float | None]


def edges_of(n_lines: int, most: int = MAX_POINTS) -> list[int]:
    """Bounds of the points: point i stands for lines ``edges[i]`` to ``edges[i + 1]``."""
    n_points = min(n_lines, most)
    return [n_lines * i // max(n_points, 1) for i in range(n_points + 1)]


def points_of(values: Sequence[float | None], edges: Sequence[int]) -> Points:
    """Summarize the values of lines as points."""
    mean: list[float | None] = []
    low: list[float | None] = []
    high: list[float | None] = []
    for begin, end in pairwise(edges):
        known = [value for value in values[begin:end] if value is not None]
        # The sum of large finite numbers may be infinite.
        mean.append(sum(value / len(known) for value in known) if known else None)
        low.append(min(known, default=None))
        high.append(max(known, default=None))
    return Points(mean, low, high)


def points_at_largest(
    values: Sequence[float | None], by: Sequence[float | None], edges: Sequence[int]
) -> Points:
    """Summarize values as points: each has the value of its line with the largest ``by``."""
    chosen: list[float | None] = []
    for begin, end in pairwise(edges):
        known = [i for i in range(begin, end) if values[i] is not None and by[i] is not None]
        chosen.append(values[max(known, key=lambda i: by[i] or 0.0)] if known else None)
    return Points(chosen, chosen, chosen)


def axis_of(lines: Sequence[Line], edges: Sequence[int], training: Sequence[Line]) -> Axis:
    """Places of the points of ``lines``; tokens are those of ``training`` at the same steps."""
    last = [end - 1 for end in edges[1:]]
    steps = [lines[i]["step"] for i in last]
    seconds = times_of(lines)
    return Axis(steps, tokens_at(steps, training), seconds and [seconds[i] for i in last])


def times_of(lines: Sequence[Line]) -> list[float] | None:
    """Times of ``lines``; one without a time, or set back, has the latest time before it."""
    known = [line["time"] for line in lines if line.get("time") is not None]
    if not known:
        return None
    times, latest = [], known[0]
    for line in lines:
        time = line.get("time")
        latest = latest if time is None else max(latest, time)
        times.append(latest)
    return times


def since(axis: Axis, begin: float | None) -> Axis:
    """Count the seconds of ``axis`` from the time ``begin``; None if no line has a time."""
    if axis.seconds is None or begin is None:
        return axis
    return Axis(axis.steps, axis.tokens, [max(value - begin, 0.0) for value in axis.seconds])


def tokens_at(steps: Sequence[int], training: Sequence[Line]) -> list[float] | None:
    """Tokens trained on at ascending ``steps``, between lines in proportion to the steps."""
    known = [(0.0, 0.0)]
    for line in training:
        if line.get("tokens") is not None:
            known.append((line["step"], max(float(line["tokens"]), known[-1][1])))
    return list(interpolate(steps, known)) if len(known) > 1 else None


def interpolate(places: Iterable[float], known: Sequence[tuple[float, float]]) -> Iterator[float]:
    """Yield the values at ascending ``places``, constant outside of the ``known`` ones."""
    i = 0
    for place in places:
        while i + 1 < len(known) and known[i + 1][0] < place:
            i += 1
        (x0, y0), (x1, y1) = known[i], known[min(i + 1, len(known) - 1)]
        share = (place - x0) / (x1 - x0) if x1 > x0 else 0.0
        yield y0 + min(max(share, 0.0), 1.0) * (y1 - y0)


def keys_of(lines: Iterable[Line]) -> list[str]:
    """Keys that are curves, in the order of their first line."""
    shapes = (key for key, _ in groupby(tuple(line) for line in lines))
    return [key for key in dict.fromkeys(k for shape in shapes for k in shape) if key not in PLACE]
