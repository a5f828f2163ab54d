"""``control/failures``: a line of JSON for each attempt that failed, and why it did.

It bounds crash loops: attempts that fail one after the other without a newer checkpoint are
numbered, and a run that ends as asked, or a newer checkpoint, starts the numbers anew.
"""

import json
import time
from pathlib import Path
from typing import Any

from runtime.run_folder import make_folder

MOST_ATTEMPTS = 3


def record_failure(control: Path, *, lines: list[str], codes: dict[int, int]) -> int:
    """Append an attempt that failed; return its number, counted since there was progress.

    ``lines`` say why, the cause first; ``codes`` are the exit codes of ranks.
    """
    make_folder(control)
    progress, last = published_step(control), _last(control)
    goes_on = last.get("attempt", MOST_ATTEMPTS) < MOST_ATTEMPTS and progress <= last["progress"]
    attempt = last["attempt"] + 1 if goes_on else 1
    told = {"attempt": attempt, "progress": progress, "reason": lines[0], "ranks": lines}
    _append(control, told | {"exit_codes": codes})
    return attempt


def record_end(control: Path, outcome: str) -> None:
    """Forgive the failures so far, if there are any: the run ended as it was asked to."""
    if "attempt" in _last(control):
        _append(control, {"outcome": outcome})


def published_step(control: Path) -> int:
    """The newest checkpoint that the run itself has told of, 0 before the first."""
    path = control / "progress"
    return int(path.read_text()) if path.exists() else 0


def _append(control: Path, record: dict[str, Any]) -> None:
    line = json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z")} | record)
    with (control / "failures").open("a") as file:
        file.write(line + "\n")


def _last(control: Path) -> dict[str, Any]:
    """The newest record; none after a line that a full disk cut off."""
    path = control / "failures"
    lines = path.read_text().splitlines() if path.exists() else []
    try:
        return json.loads(lines[-1]) if lines else {}
    except ValueError:
        return {}
