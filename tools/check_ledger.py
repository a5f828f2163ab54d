"""Replay a run's ledger: ``shardloom check-ledger RUN_FOLDER [--against OTHER_RUN_FOLDER]``

Proves that every row of every step was consumed exactly once across all restarts of the run, or
prints each violation. --against also checks that two runs consumed the same tokens, and prints by
how much their losses and gradient norms differ. Exit code 1: a violation.
"""

import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import numpy as np

from data.batch_size import batch_size_of
from metrics.ledger import AttemptHeader
from runtime import exit_codes
from runtime.log import say
from runtime.run_folder import iterate_lines, list_checkpoints, step_of
from tools.cli import Parser, path_argument, reporting_errors

SHOWN_VIOLATIONS = 20
# No global batch is larger; more rows would need memory before any of them is checked.
MAX_ROWS = 1 << 20
# Fields of ``AttemptHeader`` that all ranks of an attempt must agree on.
SHARED = ("parent", "resumed_from", "data_after", "world_size", "n_rows", "ramp")
# Columns of the rows of a step: (n, 6) int64, sorted by the first.
ROW, START, END, CRC32 = 0, [0, 1, 2], [0, 3, 4], [0, 5]


@dataclass(frozen=True)
class LedgerEntry:
    """The ledger line of one rank for one step, or the merged lines of all ranks."""

    step: int
    rows: np.ndarray
    loss: float
    grad_norm: float
    n_empty_rows: int = 0
    attempt: str = ""


@dataclass(frozen=True)
class DataPosition:
    """Position in the data between two steps."""

    starts: np.ndarray
    """Start of the next read of each row, (n, 3): row, document, token."""
    next_row: int
    """First row of the next step."""


@dataclass
class Lineage:
    """Steps that led to the run's newest state, without those that were rolled back."""

    steps: dict[int, LedgerEntry] = field(default_factory=dict)
    positions: dict[int, DataPosition] = field(default_factory=dict)
    """Position in the data after each step."""
    n_attempts: int = 0
    skipped: dict[int, int] = field(default_factory=dict)
    """Steps after which data was skipped on purpose, with the number of skipped steps."""
    violations: list[str] = field(default_factory=list)

    def add_violation(self, text: str) -> None:
        if text not in self.violations:
            self.violations.append(text)


@dataclass
class RankLedger:
    """All lines that one rank wrote in one attempt."""

    head: AttemptHeader
    entries: list[LedgerEntry] = field(default_factory=list)


@reporting_errors
def main(arguments: list[str]) -> int:
    parser = Parser("shardloom check-ledger", description=__doc__)
    parser.add_argument("run", type=path_argument, metavar="RUN_FOLDER")
    parser.add_argument("--against", type=path_argument, metavar="OTHER_RUN_FOLDER")
    options = parser.parse_args(arguments)
    folders = [options.run] if options.against is None else [options.run, options.against]
    lineages = [replay(folder) for folder in folders]
    for folder, lineage in zip(folders, lineages, strict=True):
        say(f"{folder}: {summary(lineage)}")
    violations = [text for lineage in lineages for text in lineage.violations]
    if options.against is not None:
        differences, text = compare(*lineages)
        violations += differences
        say(text)
    if len(violations) > SHOWN_VIOLATIONS:
        violations[SHOWN_VIOLATIONS:] = [f"and {len(violations) - SHOWN_VIOLATIONS} more"]
    say(*violations)
    return exit_codes.FAILED if violations else exit_codes.DONE


def summary(lineage: Lineage) -> str:
    count, n_attempts = len(lineage.steps), lineage.n_attempts
    attempts = f"{n_attempts} attempt{'s' * (n_attempts != 1)}"
    if lineage.violations:
        return f"{count} steps by {attempts}, {len(lineage.violations)} violations"
    n_skipped = sum(lineage.skipped.values())
    skipped = f"; data of {n_skipped} steps skipped on purpose" if n_skipped else ""
    return f"steps 1..{count}: every row of every step consumed exactly once by {attempts}{skipped}"


def replay(run_folder: Path) -> Lineage:
    """Replay all attempts in order; each one rewinds to the step that it resumed from.

    A step counts only if all ranks logged it. Raises ``FileNotFoundError`` if there is no ledger.
    """
    lineage = Lineage()
    files = sorted((run_folder / "ledger").glob("rank-*.jsonl"))
    if not files:
        raise FileNotFoundError(f"{run_folder / 'ledger'}: no rank-*.jsonl; metrics.enable_ledger")
    attempts: dict[str, dict[int, RankLedger]] = defaultdict(dict)
    # Rank 0 takes part in every attempt, so its file gives their order.
    for path in files:
        for ledger in _read_file(path, lineage):
            ranks = attempts[ledger.head.attempt]
            if ledger.head.rank in ranks:
                lineage.add_violation(f"{path}: attempt {ledger.head.attempt} begins twice")
            ranks[ledger.head.rank] = ledger
    for name, ranks in attempts.items():
        if 0 in ranks:
            lineage.n_attempts += 1
            _replay_attempt(ranks, lineage)
        elif any(ledger.entries for ledger in ranks.values()):
            lineage.add_violation(f"attempt {name}: no line from rank 0")
    _check_end(run_folder / "checkpoints", lineage)
    return lineage


def _check_end(checkpoints: Path, lineage: Lineage) -> None:
    """Check that the ledger goes as far as the checkpoints: its last lines may not be written."""
    saved, last = list_checkpoints(checkpoints), max(lineage.steps, default=0)
    if saved and step_of(saved[0]) > last:
        text = "the steps since are unknown"
        lineage.add_violation(f"{saved[0]} exists, but the ledger ends at step {last}: {text}")


def _read_file(path: Path, lineage: Lineage) -> Iterator[RankLedger]:
    """Yield the attempts of one rank. A kill may leave the last line of each torn."""
    ledger: RankLedger | None = None
    torn = 0
    for number, line in enumerate(_lines_of(path, lineage), start=1):
        parsed = _parse(line)
        if isinstance(parsed, AttemptHeader):
            if ledger is not None:
                yield ledger
            ledger, torn = RankLedger(parsed), 0
            continue
        if torn or (ledger is None and parsed is not None):
            lineage.add_violation(
                f"{path}, line {torn or number}: torn, and not the last of its attempt"
            )
        if parsed is None:
            torn = number
        elif ledger is not None:
            ledger.entries.append(parsed)
    if ledger is not None:
        yield ledger


def _lines_of(path: Path, lineage: Lineage) -> Iterator[bytes]:
    try:
        yield from iterate_lines(path)
    except OSError as error:
        lineage.add_violation(f"{path}: {error.strerror or error}")


def _parse(line: bytes) -> AttemptHeader | LedgerEntry | None:
    """Parse a ledger line; return None if the line is torn."""
    try:
        values = json.loads(line)
        if "attempt" in values:
            if "place" in values:  # The name of ``dp_rank`` before.
                values["dp_rank"] = values.pop("place")
            return _checked(AttemptHeader(**values))
        rows = np.array(values["rows"], np.int64).reshape(-1, 6)
        loss, grad_norm = (float.fromhex(values[name]) for name in ("loss", "grad_norm"))
        n_empty_rows = _whole(values.get("empty_rows", 0))
        return LedgerEntry(_whole(values["step"]), rows, loss, grad_norm, n_empty_rows)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _checked(head: AttemptHeader) -> AttemptHeader:
    """Raise ``TypeError`` or ``ValueError`` unless all fields have their type and range."""
    numbers = (head.resumed_from, head.data_after, head.world_size, head.rank, head.dp_rank)
    for number in (*numbers, head.n_rows, *(n for phase in head.ramp for n in phase)):
        _whole(number)
    if head.world_size == 0 or head.n_rows > MAX_ROWS or head.rank >= head.world_size:
        raise ValueError("no such rank or row")
    if not isinstance(head.attempt, str) or not isinstance(head.parent, str | None):
        raise TypeError("attempt and parent are names")
    if any(len(phase) != 2 or phase[1] > MAX_ROWS for phase in head.ramp):
        raise ValueError("a phase of the ramp is not (steps, rows)")
    return head


def _whole(number: object) -> int:
    """Return ``number``; raise ``ValueError`` unless it is an integer of a ledger."""
    if type(number) is not int or not 0 <= number < 2**53:
        raise ValueError(f"{number!r} is not a whole number")
    return number


def _replay_attempt(ranks: dict[int, RankLedger], lineage: Lineage) -> None:
    head = ranks[0].head
    for rank, ledger in ranks.items():
        for name in SHARED:
            if getattr(ledger.head, name) != getattr(head, name):
                lineage.add_violation(
                    f"attempt {head.attempt}: ranks 0 and {rank} differ in {name}"
                )
        _check_order(ledger, lineage)
    position = _rewind(head, lineage)
    by_step: dict[int, dict[int, LedgerEntry]] = defaultdict(dict)
    for rank, ledger in ranks.items():
        for entry in ledger.entries:
            by_step[entry.step][rank] = entry
    for step, entries in sorted(by_step.items()):
        # Counted first, because a line may claim any number of ranks.
        n_ranks = head.world_size
        if len(entries) >= n_ranks and entries.keys() >= set(range(n_ranks)):
            entry = _merge(entries, ranks, lineage)
            size = batch_size_of(step, head.ramp, head.n_rows)
            position = _check_rows(entry, position, size, head.n_rows, lineage)
            lineage.steps[step], lineage.positions[step] = entry, position
        elif step != max(by_step):
            missing = next(rank for rank in count() if rank not in entries)
            lineage.add_violation(
                f"step {step}: rank {missing} did not log it, but other ranks went on"
            )


def _check_order(ledger: RankLedger, lineage: Lineage) -> None:
    before = ledger.head.resumed_from
    for entry in ledger.entries:
        if entry.step > before + 1:
            lineage.add_violation(f"step {entry.step} without step {entry.step - 1}")
        elif entry.step <= before:
            text = f"step {entry.step} again, but attempt {ledger.head.attempt} was already past it"
            lineage.add_violation(text)
        before = entry.step


def _rewind(head: AttemptHeader, lineage: Lineage) -> DataPosition:
    """Drop all steps after the one that the attempt resumed from; return the data position there.

    The position has no rows if ``data_after`` is a step that was never finished.
    """
    prefix = f"attempt {head.attempt} resumed from step {head.resumed_from}"
    resumed, data_after = head.resumed_from, head.data_after
    for step in {resumed, data_after} - {0} - lineage.steps.keys():
        lineage.add_violation(f"{prefix}, but step {step} was never finished")
    if resumed in lineage.steps and lineage.steps[resumed].attempt != head.parent:
        last = lineage.steps[resumed].attempt
        lineage.add_violation(
            f"{prefix} of attempt {head.parent}, but it was trained again by {last}"
        )
    starts = np.zeros((0 if data_after else head.n_rows, 3), np.int64)
    starts[:, ROW] = range(len(starts))
    position = DataPosition(starts, next_row=0)
    if data_after in lineage.steps:
        position = lineage.positions[data_after]
    lineage.steps = {step: entry for step, entry in lineage.steps.items() if step <= resumed}
    before = lineage.skipped.get(resumed, 0)
    lineage.skipped = {step: n for step, n in lineage.skipped.items() if step < resumed}
    if data_after != resumed:
        lineage.skipped[resumed] = before + data_after - resumed
    return position


def _merge(
    entries: dict[int, LedgerEntry], ranks: dict[int, RankLedger], lineage: Lineage
) -> LedgerEntry:
    """Merge the lines of all ranks for one step."""
    first = entries[0]
    readers: dict[int, int] = {}
    for rank, entry in sorted(entries.items()):
        if entry.n_empty_rows != first.n_empty_rows:
            lineage.add_violation(f"step {entry.step}: ranks 0 and {rank} differ in empty_rows")
        for name in ("loss", "grad_norm"):
            if getattr(entry, name).hex() != getattr(first, name).hex():
                lineage.add_violation(f"step {entry.step}: ranks 0 and {rank} differ in {name}")
        reader = readers.setdefault(ranks[rank].head.dp_rank, rank)
        if not np.array_equal(entries[reader].rows, entry.rows):
            text = (
                f"step {entry.step}: ranks {reader} and {rank} share rows, but read different ones"
            )
            lineage.add_violation(text)
    rows = np.concatenate([entries[reader].rows for reader in readers.values()])
    numbers, index, counts = np.unique(rows[:, ROW], return_index=True, return_counts=True)
    for row in numbers[counts > 1]:
        lineage.add_violation(f"step {first.step}: two ranks have row {row}")
    return replace(first, rows=rows[index], attempt=ranks[0].head.attempt)


def _check_rows(
    entry: LedgerEntry, before: DataPosition, size: int, n_rows: int, lineage: Lineage
) -> DataPosition:
    """Check that the next ``size`` rows were read and that each continues where it ended before."""
    numbers, starts = entry.rows[:, ROW], before.starts
    end = before.next_row + size + min(entry.n_empty_rows, n_rows)
    for row in np.setxor1d(numbers, np.arange(before.next_row, end) % n_rows):
        what = "is not in the global batch" if row in numbers else "was read by no rank"
        lineage.add_violation(f"step {entry.step}: row {row} {what}")
    common, current, previous = np.intersect1d(numbers, starts[:, ROW], return_indices=True)
    actual, wanted = entry.rows[:, START][current], starts[previous]
    for index in np.flatnonzero((actual != wanted).any(axis=1)):
        lineage.add_violation(
            f"row {common[index]} of step {entry.step} starts at {_position(actual[index])},"
            f" but its previous read ended at {_position(wanted[index])}"
        )
    others = starts[~np.isin(starts[:, ROW], numbers)]
    after = np.concatenate([entry.rows[:, END], others])
    return DataPosition(after, end % n_rows)


def _position(start: np.ndarray) -> tuple[int, int]:
    return int(start[1]), int(start[2])


def compare(first: Lineage, second: Lineage) -> tuple[list[str], str]:
    """Compare two runs; return token differences and a summary with loss and norm differences."""
    common = sorted(first.steps.keys() & second.steps.keys())
    if not common:
        return ["--against: the runs have no common step"], "no step of both: nothing was compared"
    differences = []
    for step in common:
        one, other = (lineage.steps[step].rows[:, CRC32] for lineage in (first, second))
        if not np.array_equal(one, other):
            unlike = set(map(tuple, one.tolist())) ^ set(map(tuple, other.tolist()))
            rows = sorted({row for row, _ in unlike})
            differences += [f"step {step}, row {row}: the tokens differ" for row in rows]
    distances = [_largest_difference(name, first, second, common) for name in ("loss", "grad_norm")]
    tokens = "different tokens" if differences else "the same tokens"
    steps = f"steps {common[0]}..{common[-1]} of both"
    return differences, f"{steps}: {tokens}; {'; '.join(distances)}"


def _largest_difference(name: str, first: Lineage, second: Lineage, steps: list[int]) -> str:
    largest, worst_step = 0.0, 0
    for step in steps:
        pair = [getattr(lineage.steps[step], name) for lineage in (first, second)]
        if pair[0].hex() != pair[1].hex():
            difference = abs(pair[0] - pair[1])
            difference = difference if math.isfinite(difference) else math.inf
            if difference > largest or worst_step == 0:
                largest, worst_step = difference, step
    if worst_step == 0:
        return f"{name} equal bit for bit"
    return f"{name} differs by {largest:.2g} at most, at step {worst_step}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
