"""Flight records of a run that hangs: which rank never entered the collective of the others.

PyTorch records the latest collectives of each rank. NCCL's watchdog writes those of the GPU when
one times out, and a rank that ends because of a failure those of the CPU. Both are pickles of
plain values, which are read here without the module that would run what they name.
"""

import os
import pickletools
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.compat import find
from runtime.filesystem import open_file, read_file
from runtime.log import logger

DUMP = "torch._C._distributed_c10d:_dump_fr_trace"
PREFIX_VARIABLE = "TORCH_FR_DUMP_TEMP_FILE"
FILE = re.compile(r"flight-record-(cpu-)?(\d{1,9})")
# One record takes up to 0.3 s, and srun kills the last launcher after 300 s (slurm/train.sbatch).
READ_SECONDS = 60.0
ROOT = f"{Path(__file__).parents[1]}{os.sep}"
# Opcodes of pickle that push a value that is their argument, or one of these.
VALUES = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
ARGUMENTS = {
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE",
}  # fmt: skip
MARK = object()


@dataclass(frozen=True)
class Collective:
    """A collective that a rank entered."""

    name: str
    """Such as gloo:all_reduce."""
    sizes: str
    is_open: bool
    """The rank waits for its end."""
    place: str
    """Innermost Shardloom line that entered it; "" if the record has none."""

    def at(self) -> str:
        return f" (at {self.place})" if self.place else ""


@dataclass(frozen=True)
class Record:
    """Needed part of a rank's flight record, which takes 2.5 MB as a whole."""

    entered: Mapping[tuple[str, str], Mapping[int, Collective]]
    """By name and description of the group, and by the collective's number."""
    ranks: Mapping[str, str]
    """Members of each group, as a text, by the group's name."""


@dataclass(frozen=True)
class Group:
    """A process group, of ranks that left a record."""

    name: str
    members: frozenset[int]
    """Global ranks, also those without a record."""
    entered: Mapping[int, Mapping[int, Collective]]
    """By rank and by the collective's number in the group, from 1."""
    unread: frozenset[int]
    """Members whose records there was no time to read."""


def write_cpu_record(environment: Mapping[str, str]) -> None:
    """Write this rank's latest collectives of the CPU beside its log, if the launcher asks."""
    prefix, dump = environment.get(PREFIX_VARIABLE), find(DUMP)
    if prefix and dump is not None:
        with (
            suppress(OSError, RuntimeError),
            open_file(Path(f"{prefix}cpu-{environment['RANK']}"), "wb") as file,
        ):
            file.write(dump())


def hanging_ranks(logs: Path, most_lines: int) -> list[str]:
    """Lines that name who hangs, by the flight records in ``logs``; the likely causes first.

    Files that are damaged, or not flight records, are ignored. After ``READ_SECONDS`` the rest is
    not read, and one more line says how many they are.
    """
    matches = [FILE.fullmatch(path.name) for path in logs.glob("flight-record-*")]
    files = sorted((m[1] or "", int(m[2]), m.string) for m in matches if m is not None)
    if files:
        logger.info("launcher: reading %d flight records in %s", len(files), logs)
    deadline = time.monotonic() + READ_SECONDS
    groups: list[Group] = []
    n_unread = 0
    # If NCCL has timed out, its records are nearer to the cause.
    for kind in ("", "cpu-"):
        paths = {rank: logs / name for each, rank, name in files if each == kind}
        records, unread = _read(paths, deadline)
        groups += _groups(records, unread)
        n_unread += len(unread)
    waiting = {
        rank
        for group in groups
        for rank, entered in group.entered.items()
        if any(collective.is_open for collective in entered.values())
    }
    found = [line for group in groups for line in _lines(group, waiting)]
    lines = [text for _, text in sorted(found, key=lambda line: line[0])][:most_lines]
    text = f"{n_unread} of {len(files)} flight records were not read, after {READ_SECONDS:.0f} s"
    return lines + [text] * (n_unread > 0)


def _read(paths: Mapping[int, Path], deadline: float) -> tuple[dict[int, Record], set[int]]:
    """Records in ``paths``, which are by rank, and the ranks whose turn came too late."""
    records: dict[int, Record] = {}
    known: dict[Any, Any] = {}
    for n_read, (rank, path) in enumerate(paths.items()):
        if time.monotonic() > deadline:
            return records, set([*paths][n_read:])
        with suppress(OSError, KeyError, TypeError, AttributeError, ValueError):
            records[rank] = _needed(read_record(path), known)
    return records, set()


def read_record(path: Path) -> dict[str, Any]:
    """Return a rank's flight record. Raises ``OSError``, and ``ValueError`` if it is none."""
    record = plain_values(read_file(path))
    if not isinstance(record, dict) or not isinstance(record.get("entries"), list):
        raise ValueError(f"{path}: no flight record")
    return record


def plain_values(data: bytes) -> Any:
    """Return what a pickle of numbers, texts, lists, tuples and dicts stands for.

    Raises ``ValueError`` for all others: what names a class or a function is not executed.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return stack.pop()
            _apply(opcode.name, argument, stack, memo)
    except (IndexError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"not a pickle of plain values: {error}") from None
    raise ValueError("not a pickle of plain values: no end")


def _apply(name: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    """Execute an opcode. Mutates ``stack`` and ``memo``."""
    if name in VALUES:
        stack.append(VALUES[name])
    elif name in ARGUMENTS:
        stack.append(argument)
    elif name in ("BINPUT", "LONG_BINPUT"):
        memo[argument] = stack[-1]
    elif name in ("BINGET", "LONG_BINGET"):
        stack.append(memo[argument])
    elif name == "MARK":
        stack.append(MARK)
    elif name == "EMPTY_LIST":
        stack.append([])
    elif name == "EMPTY_DICT":
        stack.append({})
    elif name in TUPLES:
        count = TUPLES[name]
        stack[-count:] = [tuple(stack[-count:])]
    elif name == "TUPLE":
        stack.append(tuple(_pop_to_mark(stack)))
    elif name == "APPENDS":
        values = _pop_to_mark(stack)
        stack[-1].extend(values)
    elif name == "APPEND":
        value = stack.pop()
        stack[-1].append(value)
    elif name == "SETITEMS":
        values = _pop_to_mark(stack)
        stack[-1].update(zip(values[::2], values[1::2], strict=True))
    elif name != "PROTO":
        raise ValueError(name)


def _pop_to_mark(stack: list[Any]) -> list[Any]:
    values = []
    while (value := stack.pop()) is not MARK:
        values.append(value)
    return values[::-1]


def _needed(record: Mapping[str, Any], known: dict[Any, Any]) -> Record:
    """Return the needed part of ``record``. Records share equal parts, which ``known`` holds."""
    entered: dict[tuple[str, str], dict[int, Collective]] = {}
    for entry in record["entries"]:
        if not entry["is_p2p"]:
            name, description = entry["process_group"]
            number, collective = int(entry["collective_seq_id"]), _collective(entry)
            numbers = entered.setdefault((name, description), {})
            numbers[known.setdefault(number, number)] = known.setdefault(collective, collective)
    ranks = {name: str(group.get("ranks", "")) for name, group in record["pg_config"].items()}
    return Record(entered, {name: known.setdefault(text, text) for name, text in ranks.items()})


def _groups(records: Mapping[int, Record], unread: set[int]) -> Iterator[Group]:
    entered: dict[tuple[str, str], dict[int, Mapping[int, Collective]]] = {}
    for rank, record in records.items():
        for group, numbers in record.entered.items():
            entered.setdefault(group, {})[rank] = numbers
    for (name, description), by_rank in entered.items():
        texts = {record.ranks.get(name, "") for record in records.values()}
        members = set(by_rank).union(*map(_numbers, texts))
        whole = by_rank | {rank: {} for rank in members & set(records) - set(by_rank)}
        late = frozenset(members & unread)
        yield Group(description or name, frozenset(members), whole, late)


def _collective(entry: Mapping[str, Any]) -> Collective:
    is_open = entry["state"] != "completed" and not entry["retired"]
    places = [f"{f['filename']}:{f['line']}" for f in entry.get("frames", [])]
    place = next((p for p in places if p.startswith(ROOT) and "site-packages" not in p), "")
    sizes = ", ".join(f"{kind.lower()} {size}" for kind, size in zip(
        entry["input_dtypes"], entry["input_sizes"], strict=False))  # fmt: skip
    return Collective(str(entry["profiling_name"]), sizes, is_open, place.removeprefix(ROOT))


def _numbers(text: str) -> set[int]:
    return {int(number) for number in re.findall(r"\d{1,9}", text)}


def _lines(group: Group, waiting: set[int]) -> Iterator[tuple[int, str]]:
    """Yield what is wrong in a group, and how far it is from the cause: 0 is the nearest.

    ``waiting``: ranks that wait in a collective of any group.
    """
    last = {rank: max(entered, default=0) for rank, entered in group.entered.items()}
    waited = [n for entered in group.entered.values() for n, c in entered.items() if c.is_open]
    number = min(waited) if waited else min(last.values()) + 1
    inside = {r: e[number] for r, e in group.entered.items() if number in e}
    if not inside or len(group.members) < 2:
        return
    first = inside[min(inside)]
    what = f"{first.name} of {group.name}, its collective {number}, {first.sizes}{first.at()}"
    who = _ranks(inside)
    if missing := [rank for rank, newest in last.items() if newest < number]:
        # A rank that waits elsewhere is late because of that.
        yield (
            int(waiting.issuperset(missing)),
            f"{_ranks(missing)} never entered {what}, where {who} waited",
        )
    elif unknown := sorted(group.members - set(group.entered) - group.unread):
        yield 2, f"{_ranks(unknown)} left no flight record; {who} waited in {what}"
    elif others := [rank for rank, each in inside.items() if each.name != first.name]:
        other = inside[others[0]]
        yield 0, f"{_ranks(others)} entered {other.name}{other.at()} instead of {what}"
    elif waited:
        why = "the network, or unequal sizes"
        if group.unread:
            why = f"of {len(group.unread)} other ranks no record was read"
        yield 3, f"{who} entered {what}, and it did not end: {why}"


def _ranks(ranks: Iterable[int]) -> str:
    found = sorted(ranks)
    shown = ", ".join(map(str, found[:8])) + (f" and {len(found) - 8} more" * (len(found) > 8))
    return f"rank{'s' * (len(found) > 1)} {shown}"
