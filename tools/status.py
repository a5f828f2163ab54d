"""Show the status of runs from their folders: ``shardloom status RUN_FOLDER... [--json]``

Prints a few lines for one folder and a table for several; --json prints one object per line. Writes
nothing and takes no lock, so it is safe beside a run that trains or starts.

goodput: time of all steps in the run's history, each counted once, over the wall time from the
first line of metrics to now or to the run's end. Lost and repeated steps, restarts, saves and
validation count as wasted.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import tomli

from checkpoint.manifest import MANIFEST_FILE as MANIFEST
from checkpoint.manifest import read_manifest, sizes_of
from launcher.failures import MOST_ATTEMPTS
from metrics.alarms import ALARM, is_alarm
from metrics.goodput import goodput
from metrics.history import split_history
from metrics.metrics_file import read_metrics
from runtime import exit_codes
from runtime.filesystem import read_file
from runtime.log import duration, say
from runtime.printable import reason_of
from runtime.provenance import FOLDER as PROVENANCE
from runtime.provenance import (
    attempt_numbers,
    changes,
    config_changes,
    describe,
    read_attempt,
)
from runtime.run_folder import list_checkpoints, read_records, read_text, step_of, unix_time
from runtime.run_lock import LOCKS, is_held_here
from tools.cli import Parser, path_argument, reporting_errors

REJECTED = "rejected"
# Outcomes after which nobody has to start the run again.
ENDS = [end.outcome for end in exit_codes.COMPLETE]
FAILED_ENDS = [end.outcome for end in exit_codes.FAILURES]
# A run is quiet after this long without a line or, if longer, the time of this many lines.
QUIET_SECONDS, QUIET_LINES = 600.0, 10
SHOWN_CHANGES = 10


@dataclass(frozen=True, kw_only=True)
class Status:
    """Status of one run. Ages are in seconds; None means that the folder has no such record."""

    run: str
    state: str
    """starting, running, done, stopped, failed; unknown if quiet and on another host."""
    why: str
    """Reason why the run is stopped, failed or quiet."""
    holder: str
    """Process and host that hold the run's lock, or held it last."""
    step: int | None
    steps: int | None
    """Total steps in the configuration."""
    loss: float | None
    validation_loss: float | None
    tokens_per_second: float | None
    mfu: float | None
    seconds_left: float | None
    """Until the configuration's last step, as the newest line estimated; None if done, and until
    the last start has written a line."""
    line_age: float | None
    """Age of the newest line of metrics."""
    checkpoint: int | None
    """Step of the newest checkpoint whose manifest verifies and whose files have the right sizes.
    Their contents are not read."""
    checkpoint_age: float | None
    restarts: int
    """Starts after the first that wrote a line of metrics."""
    failures: int
    """Failed attempts in control/failures."""
    last_failure: str
    last_failure_age: float | None
    alarms: int
    """Alarms in alarms.jsonl; warnings are counted apart."""
    last_alarm: str
    last_alarm_age: float | None
    warnings: int
    last_warning: str
    last_warning_age: float | None
    goodput: float | None
    provenance: dict[str, Any] | None
    """Provenance of the last attempt: ``runtime.provenance.Attempt``."""
    provenance_lines: list[str]
    """The same in words, and what changed since the attempt before."""
    problems: list[str]
    """Files that could not be read, with the reason."""


@reporting_errors
def main(arguments: list[str]) -> int:
    parser = Parser("shardloom status", description=__doc__)
    parser.add_argument("folders", nargs="+", type=path_argument, metavar="RUN_FOLDER")
    parser.add_argument("--json", action="store_true", help="print one JSON object per run")
    options = parser.parse_args(arguments)
    found, others = [], []
    for folder in options.folders:
        try:
            if is_run_folder(folder):
                found.append(read_status(folder, time.time()))
            else:
                others.append(f"{folder}: not a run folder: no control/lock")
        except OSError as error:
            others.append(f"{folder}: {error}")
    if options.json:
        lines = [json.dumps(asdict(status)) for status in found]
    elif len(options.folders) == 1:
        lines = [line for status in found for line in paragraph(status)]
    else:
        lines = table(found)
    say(*lines)
    say(*others, file=sys.stderr)
    return exit_codes.BAD_CONFIG if others else exit_codes.DONE


def is_run_folder(folder: Path) -> bool:
    """True if a run has locked ``folder``, or if a launcher says there why none could.

    Raises ``OSError`` if it cannot be read.
    """
    for name in ("lock", "exit_code", "failures"):
        try:
            (folder / "control" / name).stat()
            return True
        except (FileNotFoundError, NotADirectoryError):
            continue
    return False


def paragraph(status: Status) -> list[str]:
    """Format one run as a few lines."""
    why = f" ({status.why})" if status.why else ""
    left = "" if status.seconds_left is None else f", left {duration(status.seconds_left)}"
    checkpoint = "none"
    if status.checkpoint is not None:
        checkpoint = f"step {status.checkpoint}, {_ago(status.checkpoint_age)}"
    failures = f"{status.failures} failed attempts"
    if status.last_failure:
        failures += f", the last {_ago(status.last_failure_age)}: {status.last_failure}"
    alarms = f"alarms {status.alarms}, the last {_ago(status.last_alarm_age)}: {status.last_alarm}"
    warned = _ago(status.last_warning_age)
    warnings = f"warnings {status.warnings}, the last {warned}: {status.last_warning}"
    return [
        f"{status.run}: {status.state}{why}, step {_cells(status)['step']}{left}",
        f"  loss {_number(status.loss, '.4f')}  validation loss"
        f" {_number(status.validation_loss, '.4f')}  tokens/s"
        f" {_number(status.tokens_per_second, ',.0f')}  mfu {_number(status.mfu, '.1%')}"
        f"  last line {_ago(status.line_age)}  process {status.holder or 'unknown'}",
        f"  checkpoint: {checkpoint}",
        f"  goodput {_number(status.goodput, '.1%')}  restarts {status.restarts}  {failures}",
        *([f"  {alarms}"] if status.alarms else []),
        *([f"  {warnings}"] if status.warnings else []),
        *(f"  {line}" for line in status.provenance_lines),
        *(f"  problem: {text}" for text in status.problems),
    ]


def table(found: Sequence[Status]) -> list[str]:
    """Format runs as a table with a header; unreadable files follow."""
    rows = [_cells(status) for status in found]
    lines = []
    if rows:
        widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
        for row in ({name: name for name in widths}, *rows):
            lines.append("  ".join(row[name].ljust(widths[name]) for name in widths).rstrip())
    return lines + [f"problem: {text}" for status in found for text in status.problems]


def _cells(status: Status) -> dict[str, str]:
    checkpoint = "none"
    if status.checkpoint is not None:
        checkpoint = f"{status.checkpoint}, {_ago(status.checkpoint_age)}"
    return {
        "run": status.run,
        "state": status.state,
        "step": f"{_number(status.step, 'd')} of {_number(status.steps, 'd')}",
        "left": "n/a" if status.seconds_left is None else duration(status.seconds_left),
        "loss": _number(status.loss, ".4f"),
        "tokens/s": _number(status.tokens_per_second, ",.0f"),
        "mfu": _number(status.mfu, ".1%"),
        "last line": _ago(status.line_age),
        "checkpoint": checkpoint,
        "goodput": _number(status.goodput, ".1%"),
        "restarts": str(status.restarts),
        "failures": str(status.failures),
        "why": status.why,
    }


def read_status(folder: Path, now: float) -> Status:
    """Read the status of a run at ``now``; missing or torn files go to ``problems``."""
    lines, problems = read_metrics(folder / "metrics.jsonl")
    lines = [line for line in lines if line.get("time") is not None]
    records, found = read_records(folder / "control" / "failures")
    problems += found
    if os.path.lexists(path := folder / "control" / "outcome") and not _outcome(path.parent)[0]:
        problems.append(f"{path}: neither done nor stopped")
    noted, found = read_records(folder / "alarms.jsonl", is_alarm)
    problems += found
    alarms = [each for each in noted if each["kind"] == ALARM]
    warnings = [each for each in noted if each["kind"] != ALARM]
    failures = [record for record in records if type(record.get("attempt")) is int]
    failure = failures[-1] if failures else {}
    failed = _seconds(str(failure.get("time")))
    state, why, end = state_of(folder / "control", now, lines, failure)
    last = exit_codes.last_step(folder / "control")
    kept = [line for line in lines if line["step"] <= last]
    history = split_history(kept)
    newest = history.training[-1] if history.training else {}
    validations = [line for line in history.other if "validation_loss" in line]
    checkpoint, saved = _newest_checkpoint(folder / "checkpoints", problems)
    provenance, provenance_lines = _provenance(folder / PROVENANCE, problems)
    return Status(
        run=str(folder),
        state=state,
        why=why,
        holder=read_text(folder / "control" / "lock"),
        # The last steps before an early exit may have no line of metrics.
        step=max((n for n in (newest.get("step"), checkpoint) if n is not None), default=None),
        # A run whose first configuration was rejected has no config.toml.
        steps=_steps(folder / "config.toml", [] if why.startswith(REJECTED) else problems),
        loss=newest.get("loss"),
        validation_loss=validations[-1]["validation_loss"] if validations else None,
        tokens_per_second=newest.get("tokens_per_second"),
        mfu=newest.get("mfu"),
        seconds_left=_seconds_left(newest, state, _mtime(folder / "control" / "lock")),
        line_age=now - lines[-1]["time"] if lines else None,
        checkpoint=checkpoint,
        checkpoint_age=now - saved if checkpoint is not None else None,
        restarts=max((line.get("restarts") or 0 for line in lines), default=0),
        failures=len(failures),
        last_failure=str(failure.get("reason", "")),
        last_failure_age=now - failed if failed else None,
        alarms=len(alarms),
        last_alarm=alarms[-1]["text"].removeprefix("ALARM: ") if alarms else "",
        last_alarm_age=now - alarms[-1]["time"] if alarms else None,
        warnings=len(warnings),
        last_warning=warnings[-1]["text"] if warnings else "",
        last_warning_age=now - warnings[-1]["time"] if warnings else None,
        goodput=goodput(kept, end),
        provenance=provenance,
        provenance_lines=provenance_lines,
        problems=problems,
    )


def state_of(
    control: Path, now: float, lines: Sequence[Mapping[str, Any]], failure: Mapping[str, Any]
) -> tuple[str, str, float]:
    """State of the run, its reason, and the time until which it holds.

    ``lines`` are those of metrics.jsonl; ``failure`` is the last one in control/failures.
    """
    locked_at, ended = _mtime(control / "lock"), _mtime(control / "outcome")
    failed = _seconds(str(failure.get("time")))
    last_line = lines[-1]["time"] if lines else 0.0
    outcome, _, reason = _outcome(control)
    runs = "running" if last_line >= locked_at else "starting"
    since = now - max(locked_at, last_line)
    is_quiet = since > max(QUIET_SECONDS, QUIET_LINES * _usual_interval(lines))
    quiet = f"no line for {duration(since)}" if is_quiet else ""
    if is_held_here(control / "lock"):
        # A new start deletes the previous outcome only after it has resumed.
        return (outcome, reason, ended) if outcome and ended >= locked_at else (runs, quiet, now)
    code, exited = exit_codes.read_exit_code(control), _mtime(control / "exit_code")
    if code is None and int(locked_at) > max(ended, failed):
        # A later start has locked the run; what ended the one before has not been cleared yet.
        outcome, failed = "", 0.0
    # Ranks that are rejected, for example because no checkpoint verifies, leave the outcome.
    is_rejected = code == exit_codes.BAD_CONFIG and exited > max(ended, failed, last_line)
    rejected = f"{REJECTED}: {exit_codes.read_rejection(control)}".removesuffix(": ")
    has_ended = ended >= failed and f"{outcome} {reason}".strip() in ENDS
    if is_rejected and not has_ended:
        return "failed", rejected, exited
    if outcome and ended >= failed:
        # Another configuration in its folder is no failure of a run that has ended.
        why = [reason, f"a later start was {rejected}"] if is_rejected else [reason]
        return outcome, "; ".join(filter(None, why)), ended
    if code == exit_codes.PREEMPTED and exited > max(failed, last_line):
        return "stopped", "a signal before the first step of the last start", exited
    # The launcher writes times in whole seconds.
    if failed and failed >= int(last_line):
        number = f"failure {failure['attempt']} of {MOST_ATTEMPTS}"
        return "failed", f"{failure.get('reason')}; {number}", failed
    if code is not None:
        text = f"launcher exited with {code}"
        return "failed", rejected if code == exit_codes.BAD_CONFIG else text, exited
    host = read_text(control / "lock").rpartition(" on ")[2]
    if host == socket.gethostname() and LOCKS.exists():
        return "failed", "process died without an outcome", max(locked_at, last_line)
    if is_quiet:
        return "unknown", f"{quiet}; only {host or 'its host'} can tell", max(locked_at, last_line)
    return runs, "", now


def _usual_interval(lines: Sequence[Mapping[str, Any]]) -> float:
    """Seconds between the two newest lines of training that one start wrote; 0 without."""
    training = [line for line in lines if "loss" in line]
    pairs = pairwise(reversed(training))
    of_one_start = (p for p in pairs if p[0].get("restarts") == p[1].get("restarts"))
    return next((newer["time"] - older["time"] for newer, older in of_one_start), 0.0)


def _seconds_left(line: Mapping[str, Any], state: str, locked_at: float) -> float | None:
    """Estimate of the newest ``line``, unless an earlier start wrote it: for its own last step."""
    is_old = line.get("time", 0.0) < locked_at
    return None if state == "done" or is_old else line.get("seconds_left")


def _outcome(control: Path) -> tuple[str, str, str]:
    """Split ``control/outcome`` into a state, " " and the reason; "" if damaged.

    The state is "done", "stopped" or, for a reason that is a failure, "failed".
    """
    text = read_text(control / "outcome").strip()
    parts = text.partition(" ")
    if text in FAILED_ENDS:
        return ("failed", *parts[1:])
    return parts if parts[0] in ("done", "stopped") else ("", "", "")


def _newest_checkpoint(folder: Path, problems: list[str]) -> tuple[int | None, float]:
    """Step and time of the newest checkpoint whose manifest and file sizes are valid."""
    try:
        saved = list_checkpoints(folder)
    except OSError as error:
        problems.append(f"{folder}: {error.strerror}")
        return None, 0.0
    for path in saved:
        try:
            sizes = sizes_of(read_manifest(path))
            wrong = [name for name, size in sizes.items() if (path / name).stat().st_size != size]
            if not wrong:
                return step_of(path), _mtime(path / MANIFEST)
            problems.append(f"{path / wrong[0]}: size differs from the manifest")
        except (OSError, ValueError) as error:
            # keep_latest_k may delete it meanwhile.
            if path.exists():
                problems.append(str(error))
    return None, 0.0


def _provenance(folder: Path, problems: list[str]) -> tuple[dict[str, Any] | None, list[str]]:
    """Provenance of the last attempt as a record and as lines."""
    record, lines = None, list[str]()
    try:
        *earlier, last = attempt_numbers(folder) or [0]
        if last:
            attempt = read_attempt(folder, last)
            record, lines = asdict(attempt), describe(folder, attempt)
            if earlier:
                before = read_attempt(folder, earlier[-1])
                compared = (folder, before, attempt)
                changed = [*config_changes(*compared), *changes(*compared)]
                more = len(changed) - SHOWN_CHANGES
                changed[SHOWN_CHANGES:] = [f"and {more} more changes"] if more > 0 else []
                lines += [f"  since attempt {before.number}: {text}" for text in changed]
    except (OSError, ValueError) as error:
        problems.append(str(error))
    return record, lines


def _steps(path: Path, problems: list[str]) -> int | None:
    try:
        return int(tomli.loads(read_file(path).decode())["training"]["steps"])
    except KeyError as error:
        problems.append(f"{path}: no key {error}")
    except (OSError, ValueError, TypeError, OverflowError, RecursionError) as error:
        problems.append(f"{path}: {reason_of(error)}")
    return None


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _seconds(stamp: str) -> float:
    """Seconds since the epoch; 0 if ``stamp`` is not a time."""
    return unix_time(stamp) or 0.0


def _number(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)


def _ago(seconds: float | None) -> str:
    return "n/a" if seconds is None else f"{duration(seconds)} ago"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
