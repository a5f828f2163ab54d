"""Covering arrays: few rows that together have every valid combination of values.

Most faults need one value or a pair of them, so rows that have every pair find nearly all that a
full product of the dimensions would (Kuhn, Wallace, Gallo: Software fault interactions, 2004). Rows
are built greedily, as in AETG (Cohen et al., 1997): each starts from a combination that no row has
yet, and gets the values that add the most others.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product
from random import Random
from typing import Any, NamedTuple

Row = dict[str, Any]
Combination = frozenset[tuple[str, Any]]
# Rows tried for each row that is taken.
CANDIDATES = 20


class CoveringArray(NamedTuple):
    rows: list[Row]
    impossible: set[Combination]
    """Combinations that no valid row has. Larger ones that have one of these are omitted."""


def covering_array(
    dimensions: Mapping[str, tuple[Any, ...]],
    is_valid: Callable[[Row], bool],
    *,
    strength: int,
    supports: Iterable[Row],
    cost: Callable[[Row], float],
    given: Sequence[Row] = (),
    seed: int = 0,
) -> CoveringArray:
    """Build rows that have every valid combination of ``strength`` values. Deterministic.

    ``given``: rows besides those that are built; their combinations need no other.
    ``dimensions``: values of each; the first is neutral. ``supports``: values to try where a
    combination is not valid with neutral others, for example because it needs more ranks.
    """
    neutral = {name: values[0] for name, values in dimensions.items()}
    supports, random = list(supports), Random(seed)
    rows: list[Row] = []
    impossible: set[Combination] = set()
    if strength > 2:
        lower = covering_array(
            dimensions, is_valid, strength=strength - 1, supports=supports, cost=cost, given=given
        )
        impossible = lower.impossible
    targets = [t for t in _targets(dimensions, strength) if not _subsets(t) & impossible]
    missing = set(targets).difference(*(covered(row, strength) for row in given))

    def complete(row: Row) -> Row:
        row = dict(row)
        names = [name for name in dimensions if name not in row]
        random.shuffle(names)
        for name in names:
            gains = [
                sum(frozenset(c) in missing for c in _with(row, name, value, strength))
                for value in dimensions[name]
            ]
            order = sorted(range(len(gains)), key=lambda i: (-gains[i], i))
            values = [dimensions[name][i] for i in order]
            valid = (value for value in values if is_valid(neutral | row | {name: value}))
            row[name] = next(valid, neutral[name])
        return row

    for target in filter(missing.__contains__, targets):
        begun = _start(dict(target), neutral, supports, is_valid)
        if begun is None:
            impossible.add(target)
            missing.discard(target)
            continue
        candidates = [complete(begun) for _ in range(CANDIDATES)]
        best = max(candidates, key=lambda row: len(missing & covered(row, strength)) / cost(row))
        rows.append({name: best[name] for name in dimensions})
        missing -= covered(best, strength)
    return CoveringArray(rows, impossible)


def _start(
    fixed: Row, neutral: Row, supports: Sequence[Row], is_valid: Callable[[Row], bool]
) -> Row | None:
    """Return the values that a row with ``fixed`` must have; None if there is no such row."""
    for support in [{}, *supports]:
        if all(fixed.get(name, value) == value for name, value in support.items()):
            row = support | fixed
            if is_valid(neutral | row):
                return row
    return None


def covered(row: Row, strength: int) -> set[Combination]:
    """Return the combinations of ``strength`` values that ``row`` has."""
    return {frozenset(chosen) for chosen in combinations(row.items(), strength)}


def _targets(dimensions: Mapping[str, tuple[Any, ...]], strength: int) -> Iterator[Combination]:
    for names in combinations(dimensions, strength):
        for values in product(*(dimensions[name] for name in names)):
            yield frozenset(zip(names, values, strict=True))


def _subsets(target: Combination) -> set[Combination]:
    """Return the combinations of all values of ``target`` but one."""
    return {target - {value} for value in target}


def _with(row: Row, name: str, value: Any, strength: int) -> Iterator[Iterable[tuple[str, Any]]]:
    """Iterate over the combinations of ``strength`` values that ``name`` adds to ``row``."""
    for others in combinations(row.items(), strength - 1):
        yield (*others, (name, value))
