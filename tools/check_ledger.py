"""Replay a run's ledger: ``python -m tools.check_ledger RUN_FOLDER [--against OTHER_RUN_FOLDER]``

Proves that every row of every step was consumed exactly once, whatever stopped and restarted the
run, or names what was not. With --against, also that two runs consumed the same tokens; and by how
much their losses and gradient norms differ. Exit code 1: a violation.
"""

import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from data.batch_size import batch_size_of
from metrics.ledger import Attempt
from runtime import exit_codes
from tools.arguments import Parser, telling_mistakes

SHOWN_VIOLATIONS = 20
# What the ranks of an attempt must agree on.
SHARED = ("parent", "resumed_from", "data_after", "world_size", "n_rows", "ramp")


# Columns of the rows of a step: (n, 6) int64, sorted by the first.
ROW, START, END, CRC32 = 0, [0, 1, 2], [0, 3, 4], [0, 5]


@dataclass(frozen=True)
class Entry:
    """A rank's line of a step, or all ranks' together."""

    step: int
    rows: np.ndarray
    loss: float
    grad_norm: float
    attempt: str = ""


@dataclass(frozen=True)
class Place:
    """Where the data stand between two steps."""

    starts: np.ndarray
    """Where each row goes on, (n, 3): row, document, place."""
    next_row: int


@dataclass
class Lineage:
    """The steps that led to the run's newest state."""

    steps: dict[int, Entry] = field(default_factory=dict)
    places: dict[int, Place] = field(default_factory=dict)
    """Where the data stood after each step."""
    n_attempts: int = 0
    left_out: dict[int, int] = field(default_factory=dict)
    """After which steps data were left out on purpose, and how many steps' worth."""
    violations: list[str] = field(default_factory=list)

    def accuse(self, text: str) -> None:
        if text not in self.violations:
            self.violations.append(text)


@dataclass
class Part:
    """What one rank wrote in one attempt."""

    head: Attempt
    entries: list[Entry] = field(default_factory=list)


@telling_mistakes
def main(arguments: list[str]) -> int:
    parser = Parser("python -m tools.check_ledger", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("--against", type=Path, metavar="OTHER_RUN_FOLDER")
    options = parser.parse_args(arguments)
    folders = [options.run] if options.against is None else [options.run, options.against]
    lineages = [replay(folder) for folder in folders]
    for folder, lineage in zip(folders, lineages, strict=True):
        print(f"{folder}: {summary(lineage)}")
    violations = [text for lineage in lineages for text in lineage.violations]
    if options.against is not None:
        differences, text = compare(*lineages)
        violations += differences
        print(text)
    if len(violations) > SHOWN_VIOLATIONS:
        violations[SHOWN_VIOLATIONS:] = [f"and {len(violations) - SHOWN_VIOLATIONS} more"]
    print("".join(f"{text}\n" for text in violations), end="")
    return exit_codes.FAILED if violations else exit_codes.DONE


def summary(lineage: Lineage) -> str:
    count, attempts = len(lineage.steps), lineage.n_attempts
    if lineage.violations:
        return f"{count} steps by {attempts} attempts, {len(lineage.violations)} violations"
    left_out = sum(lineage.left_out.values())
    besides = f"; the data of {left_out} steps left out on purpose" if left_out else ""
    return (
        f"steps 1..{count}: every row of every step consumed exactly once by {attempts}"
        f" attempts{besides}"
    )


def replay(run_folder: Path) -> Lineage:
    """Follow the attempts in their order: each goes back to the step that it resumed from.

    A step counts once all its ranks logged it. Raises ``FileNotFoundError`` without a ledger.
    """
    lineage = Lineage()
    files = sorted((run_folder / "ledger").glob("rank-*.jsonl"))
    if not files:
        raise FileNotFoundError(f"{run_folder / 'ledger'}: no rank-*.jsonl; metrics.enable_ledger")
    attempts: dict[str, dict[int, Part]] = defaultdict(dict)
    # The first rank took part in all attempts, so its file has their order.
    for path in files:
        for part in _read_file(path, lineage):
            ranks = attempts[part.head.attempt]
            if part.head.rank in ranks:
                lineage.accuse(f"{path}: attempt {part.head.attempt} begins twice")
            ranks[part.head.rank] = part
    for name, ranks in attempts.items():
        if 0 in ranks:
            lineage.n_attempts += 1
            _replay_attempt(ranks, lineage)
        elif any(part.entries for part in ranks.values()):
            lineage.accuse(f"attempt {name}: no line of rank 0")
    return lineage


def _read_file(path: Path, lineage: Lineage) -> Iterator[Part]:
    """The attempts of one rank. The last line of each may be torn: it was killed writing it."""
    part: Part | None = None
    torn = 0
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        parsed = _parse(line)
        if isinstance(parsed, Attempt):
            if part is not None:
                yield part
            part, torn = Part(parsed), 0
            continue
        if torn or (part is None and parsed is not None):
            lineage.accuse(f"{path}, line {torn or number}: torn, and not the last of its attempt")
        if parsed is None:
            torn = number
        elif part is not None:
            part.entries.append(parsed)
    if part is not None:
        yield part


def _parse(line: bytes) -> Attempt | Entry | None:
    """A line of a ledger; None: it is not a whole one."""
    try:
        values = json.loads(line)
        if "attempt" in values:
            return Attempt(**values)
        rows = np.array(values["rows"], np.int64).reshape(-1, 6)
        loss, grad_norm = (float.fromhex(values[name]) for name in ("loss", "grad_norm"))
        return Entry(values["step"], rows, loss, grad_norm)
    except (ValueError, TypeError, KeyError):
        return None


def _replay_attempt(ranks: dict[int, Part], lineage: Lineage) -> None:
    head = ranks[0].head
    for rank, part in ranks.items():
        for name in SHARED:
            if getattr(part.head, name) != getattr(head, name):
                lineage.accuse(f"attempt {head.attempt}: ranks 0 and {rank} differ in {name}")
        _check_order(part, lineage)
    place = _go_back(head, lineage)
    by_step: dict[int, dict[int, Entry]] = defaultdict(dict)
    for rank, part in ranks.items():
        for entry in part.entries:
            by_step[entry.step][rank] = entry
    for step, entries in sorted(by_step.items()):
        missing = set(range(head.world_size)) - entries.keys()
        if not missing:
            entry = _merge(entries, ranks, lineage)
            size = batch_size_of(step, head.ramp, head.n_rows)
            place = _check_rows(entry, place, size, head.n_rows, lineage)
            lineage.steps[step], lineage.places[step] = entry, place
        elif step != max(by_step):
            lineage.accuse(f"step {step}: rank {min(missing)} did not log it, and others went on")


def _check_order(part: Part, lineage: Lineage) -> None:
    before = part.head.resumed_from
    for entry in part.entries:
        if entry.step > before + 1:
            lineage.accuse(f"step {entry.step} without step {entry.step - 1}")
        elif entry.step <= before:
            text = f"step {entry.step} again, although attempt {part.head.attempt} was past it"
            lineage.accuse(text)
        before = entry.step


def _go_back(head: Attempt, lineage: Lineage) -> Place:
    """Forget the steps after the one that the attempt resumed from; return where rows must start.

    No rows if the step that says where was never finished.
    """
    goes_on_after = f"attempt {head.attempt} resumed from step {head.resumed_from}"
    resumed, data_after = head.resumed_from, head.data_after
    for step in {resumed, data_after} - {0} - lineage.steps.keys():
        lineage.accuse(f"{goes_on_after}, but step {step} was never finished")
    if resumed in lineage.steps and lineage.steps[resumed].attempt != head.parent:
        last = lineage.steps[resumed].attempt
        lineage.accuse(f"{goes_on_after} of attempt {head.parent}, but it was made again by {last}")
    starts = np.zeros((0 if data_after else head.n_rows, 3), np.int64)
    starts[:, ROW] = range(len(starts))
    place = Place(starts, next_row=0)
    if data_after in lineage.steps:
        place = lineage.places[data_after]
    lineage.steps = {step: entry for step, entry in lineage.steps.items() if step <= resumed}
    before = lineage.left_out.get(resumed, 0)
    lineage.left_out = {step: n for step, n in lineage.left_out.items() if step < resumed}
    if data_after != resumed:
        lineage.left_out[resumed] = before + data_after - resumed
    return place


def _merge(entries: dict[int, Entry], ranks: dict[int, Part], lineage: Lineage) -> Entry:
    """All ranks' lines of a step as one."""
    first = entries[0]
    readers: dict[int, int] = {}
    for rank, entry in sorted(entries.items()):
        for name in ("loss", "grad_norm"):
            if getattr(entry, name).hex() != getattr(first, name).hex():
                lineage.accuse(f"step {entry.step}: ranks 0 and {rank} differ in {name}")
        reader = readers.setdefault(ranks[rank].head.place, rank)
        if not np.array_equal(entries[reader].rows, entry.rows):
            text = f"step {entry.step}: ranks {reader} and {rank} share rows, and read others"
            lineage.accuse(text)
    rows = np.concatenate([entries[reader].rows for reader in readers.values()])
    numbers, index, counts = np.unique(rows[:, ROW], return_index=True, return_counts=True)
    for row in numbers[counts > 1]:
        lineage.accuse(f"step {first.step}: two ranks have row {row}")
    return Entry(first.step, rows[index], first.loss, first.grad_norm, ranks[0].head.attempt)


def _check_rows(entry: Entry, before: Place, size: int, n_rows: int, lineage: Lineage) -> Place:
    """Check that the next ``size`` rows are there, and that each goes on where it ended before."""
    numbers, starts = entry.rows[:, ROW], before.starts
    for row in np.setxor1d(numbers, np.arange(before.next_row, before.next_row + size) % n_rows):
        what = "is no row of the batch" if row in numbers else "was read by no rank"
        lineage.accuse(f"step {entry.step}: row {row} {what}")
    common, ours, theirs = np.intersect1d(numbers, starts[:, ROW], return_indices=True)
    actual, wanted = entry.rows[:, START][ours], starts[theirs]
    for index in np.flatnonzero((actual != wanted).any(axis=1)):
        lineage.accuse(
            f"row {common[index]} of step {entry.step} starts at {_place(actual[index])}, but the"
            f" one before it ended at {_place(wanted[index])}"
        )
    others = starts[~np.isin(starts[:, ROW], numbers)]
    after = np.concatenate([entry.rows[:, END], others])
    return Place(after, (before.next_row + size) % n_rows)


def _place(start: np.ndarray) -> tuple[int, int]:
    return int(start[1]), int(start[2])


def compare(ours: Lineage, theirs: Lineage) -> tuple[list[str], str]:
    """Where two runs consumed other tokens, and how much their losses and norms differ."""
    common = sorted(ours.steps.keys() & theirs.steps.keys())
    differences = []
    for step in common:
        one, other = (lineage.steps[step].rows[:, CRC32] for lineage in (ours, theirs))
        if not np.array_equal(one, other):
            unlike = set(map(tuple, one.tolist())) ^ set(map(tuple, other.tolist()))
            rows = sorted({row for row, _ in unlike})
            differences += [f"step {step}, row {row}: not the tokens of both" for row in rows]
    told = [_largest_difference(name, ours, theirs, common) for name in ("loss", "grad_norm")]
    tokens = "other tokens" if differences else "the same tokens"
    return differences, f"steps 1..{len(common)} of both: {tokens}; {'; '.join(told)}"


def _largest_difference(name: str, ours: Lineage, theirs: Lineage, steps: list[int]) -> str:
    largest, where = 0.0, 0
    for step in steps:
        pair = [getattr(lineage.steps[step], name) for lineage in (ours, theirs)]
        if pair[0].hex() != pair[1].hex():
            difference = abs(pair[0] - pair[1])
            difference = difference if math.isfinite(difference) else math.inf
            if difference > largest or where == 0:
                largest, where = difference, step
    if where == 0:
        return f"{name} equal bit for bit"
    return f"{name} differs by {largest:.2g} at most, at step {where}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
