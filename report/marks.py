"""Marks on a run's curves: checkpoints, restarts, failures, alarms, skipped steps, the end."""

import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from metrics.alarms import is_alarm
from metrics.history import ROLLED_BACK, Line
from report.history import times_of
from runtime.filesystem import parse_object
from runtime.printable import printable
from runtime.run_folder import (
    iterate_lines,
    list_checkpoints,
    read_records,
    read_text,
    step_of,
    unix_time,
)

MAX_MARKS, MAX_STEP, MAX_LEDGER_BYTES, MAX_TEXT = 500, 1 << 53, 1 << 30, 400
# Counts in lines of metrics whose growth is a mark.
COUNTS = {"skipped_steps": "updates skipped", "bad_records": "bad records skipped"}


@dataclass(frozen=True)
class Mark:
    """An event at a step. ``time`` is Unix time in seconds, if a file says."""

    kind: str
    step: int
    text: str
    time: float | None = None


def marks_of(
    folder: Path, training: Sequence[Line], rollbacks: Sequence[Line] = ()
) -> tuple[list[Mark], list[str]]:
    """Read the marks of a run, by step, and the files or marks that are missing.

    ``training``: the lines of metrics that count. ``rollbacks``: those that rollbacks wrote.
    """
    failures, problems = read_records(folder / "control" / "failures")
    alarms, damaged = read_records(folder / "alarms.jsonl", is_alarm)
    problems += damaged
    starts = starts_in_ledger(folder / "ledger" / "rank-00000.jsonl", training, problems)
    checkpoints = list(_checkpoints(folder / "checkpoints", problems))
    found = [
        *checkpoints,
        *starts,
        *_starts_in_metrics(training, [mark.step for mark in starts if mark.kind == "restart"]),
        *_rollbacks(rollbacks, [mark.step for mark in starts if mark.kind == "rollback"]),
        *_failures(failures, training),
        *(Mark(line["kind"], line["step"], _short(line["text"]), line["time"]) for line in alarms),
        *_growths(training),
        *_nonfinite(training),
        *_end(folder, training, checkpoints),
    ]
    marks: list[Mark] = []
    for kind in dict.fromkeys(mark.kind for mark in found):
        same = [mark for mark in found if mark.kind == kind and mark.step < MAX_STEP]
        if len(same) > MAX_MARKS:
            text = f"{folder}: only the last {MAX_MARKS} of {len(same):,} marks of kind {kind}"
            problems.append(f"{text} are shown")
        marks += same[-MAX_MARKS:]
    return sorted(marks, key=lambda mark: (mark.step, mark.time or 0.0)), problems


def _checkpoints(folder: Path, problems: list[str]) -> Iterator[Mark]:
    try:
        saved = list_checkpoints(folder)
    except OSError as error:
        problems.append(f"{folder}: {error.strerror}")
        return
    for path in reversed(saved):
        yield Mark("checkpoint", step_of(path), f"checkpoint {path.name}", _mtime(path))
    for path in sorted(folder.glob("*-step-*")):
        if match := re.fullmatch(r"(corrupt|abandoned|replaced)-step-(\d{8,40})-\w+", path.name):
            # Only a damaged one is quarantined: a rollback renames those that it undoes.
            verb = "quarantined as" if match[1] == "corrupt" else "renamed to"
            text = f"checkpoint {verb} {path.name}"
            yield Mark("quarantined", int(match[2]), text)


def starts_in_ledger(path: Path, training: Sequence[Line], problems: list[str]) -> list[Mark]:
    """Restarts and rollbacks: the first lines of the attempts in rank 0's ledger."""
    steps = [line["step"] for line in training]
    if _size(path) > MAX_LEDGER_BYTES:
        problems.append(f"{path}: {_size(path):,} bytes are not read for restarts and rollbacks")
        return []
    marks = []
    try:
        # Attempts are few, and steps many.
        lines = [line for line in iterate_lines(path) if line.startswith(b'{"attempt"')]
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(f"{path}: {error.strerror or error}")
        return []
    for number, line in enumerate(lines):
        step, after = (parse_object(line).get(key) for key in ("resumed_from", "data_after"))
        if type(step) is not int or type(after) is not int or step < 0 or number == 0:
            continue
        # The ledger has no times. What follows is of this attempt, or of a later one.
        following = training[i] if (i := bisect_right(steps, step)) < len(steps) else {}
        kind, text = "restart", f"restart from step {step}"
        if after > step:
            kind, text = "rollback", _rollback_text(after, step)
        marks.append(Mark(kind, step, text, following.get("time")))
    return marks


def _rollback_text(after: int, step: int) -> str:
    return f"rollback from step {after} to {step}; its data are skipped"


def _starts_in_metrics(training: Sequence[Line], known: Sequence[int]) -> Iterator[Mark]:
    """Restarts without a ledger, which a start may turn on or off; ``known``: steps of others."""
    for old, new in pairwise(training):
        count = new.get("restarts") or 0
        if count == (old.get("restarts") or 0):
            continue
        if not any(old["step"] <= step < new["step"] for step in known):
            text = f"restart {count:g}, after step {old['step']}"
            yield Mark("restart", old["step"], text, new.get("time"))


def _rollbacks(lines: Iterable[Line], known: Sequence[int]) -> Iterator[Mark]:
    """Rollbacks without a ledger; ``known``: steps of others."""
    for line in lines:
        step, after = line["step"], line[ROLLED_BACK]
        if step not in known and isinstance(after, int | float) and step <= after < MAX_STEP:
            yield Mark("rollback", step, _rollback_text(int(after), step), line.get("time"))


def _failures(records: Iterable[dict[str, Any]], training: Sequence[Line]) -> Iterator[Mark]:
    times = times_of(training) or []
    for record in records:
        reason, stamp, saved = (record.get(key) for key in ("reason", "time", "progress"))
        if not isinstance(reason, str) or not isinstance(stamp, str):
            continue
        time = unix_time(stamp)
        # Lines that the next start repeated are gone, but not those before its checkpoint.
        step = saved if type(saved) is int and saved >= 0 else 0
        if time is not None and (i := bisect_right(times, time)):
            step = max(step, training[i - 1]["step"])
        yield Mark("failure", step, f"failed: {_short(reason)}", time)


def _growths(training: Sequence[Line]) -> Iterator[Mark]:
    for key, what in COUNTS.items():
        before = 0.0
        for line in training:
            count = line.get(key) or 0.0
            if count > before:
                text = f"{count - before:g} {what} since the last line, {count:g} in all"
                yield Mark("skipped", line["step"], text, line.get("time"))
            before = count


def _nonfinite(training: Sequence[Line]) -> Iterator[Mark]:
    for line in training:
        for key, what in (("loss", "loss"), ("grad_norm", "gradient norm")):
            if line.get(key, 0.0) is None:
                yield Mark("skipped", line["step"], f"the {what} is not finite", line.get("time"))


def _end(folder: Path, training: Sequence[Line], checkpoints: Sequence[Mark]) -> Iterator[Mark]:
    path = folder / "control" / "outcome"
    outcome = read_text(path)
    if outcome and training:
        # The last steps before an early end may have no line.
        saved = [mark.step for mark in checkpoints if mark.kind == "checkpoint"]
        step = max([training[-1]["step"], *saved])
        yield Mark("end", step, f"end: {_short(outcome)}", _mtime(path))


def _short(text: str) -> str:
    return printable(text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} ...")


def _mtime(path: Path) -> float | None:
    try:
        return os.lstat(path).st_mtime
    except OSError:
        return None


def _size(path: Path) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0
