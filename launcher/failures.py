"""``control/failures``: one line of JSON for each failed attempt, with the reason.

This bounds crash loops. Consecutive failures without a newer checkpoint are numbered; a newer
checkpoint, or a run that ends as requested, resets the number.
"""

import json
import time
from pathlib import Path
from typing import Any

from runtime.filesystem import make_folder, open_file, parse_object, read_file

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
    """Step of the newest checkpoint in ``control/progress``, 0 before the first."""
    path = control / "progress"
    try:
        return int(read_file(path)) if path.exists() else 0
    except ValueError:  # not what a run wrote
        return 0


def _append(control: Path, record: dict[str, Any]) -> None:
    line = json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z")} | record)
    with open_file(control / "failures", "ab+") as file:
        file.write(f"{line}\n".encode())


def _last(control: Path) -> dict[str, Any]:
    """Return the newest record, {} if there is none or a full disk truncated it."""
    path = control / "failures"
    lines = read_file(path).splitlines() if path.exists() else []
    record = parse_object(lines[-1]) if lines else {}
    numbers = [record.get(key, 0) for key in ("attempt", "progress")]
    return record if all(type(number) is int for number in numbers) else {}
