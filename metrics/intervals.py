"""Sets of times as sorted, disjoint intervals."""

from collections.abc import Sequence

Interval = tuple[float, float]


def merge(intervals: Sequence[Interval]) -> list[Interval]:
    """Sorted, disjoint intervals that cover the same times."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif end > begin:
            merged.append((begin, end))
    return merged


def intersect(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """Times in both; ``a`` and ``b`` are merged."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            found.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def subtract(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """Times in ``a`` and not in ``b``; both are merged."""
    if not a:
        return []
    first, last = a[0][0], a[-1][1]
    gaps, begin = [], first
    for start, end in b:
        if start > begin:
            gaps.append((begin, min(start, last)))
        begin = max(begin, end)
    gaps.append((begin, max(begin, last)))
    return intersect(a, [gap for gap in gaps if gap[0] < gap[1]])


def total(intervals: list[Interval]) -> float:
    """Length of merged intervals."""
    return sum(end - begin for begin, end in intervals)
