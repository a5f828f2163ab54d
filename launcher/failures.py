"""``control/failures``: one line of JSON for each failed attempt, with the reason.

This bounds crash loops. Consecutive failures without a newer checkpoint are numbered; a newer
checkpoint, or a run that ends as requested, resets the number.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from runtime.filesystem import make_folder, quarantine_file
from runtime.log import logger
from runtime.run_folder import (
    LineFile,
    WriteAlarm,
    list_checkpoints,
    read_lines,
    read_number,
    step_of,
    timestamp,
)

MOST_ATTEMPTS = 3


def record_failure(control: Path, *, lines: list[str], codes: dict[int, int]) -> int:
    """Append a failed attempt; return its number since the last progress, from 1.

    ``lines`` give the reason, the cause first. ``codes`` are the exit codes by rank.
    """
    make_folder(control)
    progress, last = newest_saved_step(control), _last(control)
    number = last.get("attempt", MOST_ATTEMPTS)
    is_repeat = number < MOST_ATTEMPTS and progress <= last.get("progress", 0)
    attempt = number + 1 if is_repeat else 1
    record = {"attempt": attempt, "progress": progress, "reason": lines[0], "ranks": lines}
    _append(control, record | {"exit_codes": codes})
    return attempt


def record_end(control: Path, outcome: str) -> None:
    """Reset the count of failures: the run ended as requested."""
    if "attempt" in _last(control):
        _append(control, {"outcome": outcome})


def newest_saved_step(control: Path) -> int:
    """Step of the run's newest checkpoint, 0 before the first.

    ``control/progress`` may be older, if it could not be written.
    """
    saved: list[Path] = []
    with suppress(OSError):
        saved = list_checkpoints(control.parent / "checkpoints")
    return step_of(saved[0]) if saved else read_number(control / "progress") or 0


def _append(control: Path, record: dict[str, Any]) -> None:
    line = json.dumps({"time": timestamp()} | record)
    file = LineFile(control / "failures")
    file.write(line)
    file.close()


def _last(control: Path) -> dict[str, Any]:
    """Return the newest record, {} if there is none or it is damaged."""
    try:
        lines = read_lines(control / "failures")
    except OSError as error:
        # Unread, it would not bound a crash loop.
        with WriteAlarm().of(control / "failures"):
            logger.warning("%s", error)
            quarantine_file(control / "failures")
        return {}
    record = lines[-1][1] if lines else {}
    is_failure = all(type(record.get(key)) is int for key in ("attempt", "progress"))
    return record if is_failure else {}
