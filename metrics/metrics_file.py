"""Lines of ``metrics.jsonl``: read them, and open the file to append. Imports no torch."""

import math
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime.filesystem import atomic_write_text, quarantine_file
from runtime.log import logger
from runtime.run_folder import LineFile, WriteAlarm, read_lines, read_records


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Lines of ``path``, [] if it is missing, and at most one problem: the file, or bad lines."""
    return read_records(path, is_metrics)


def is_metrics(record: dict[str, Any]) -> bool:
    """True if the object may be a line: a step, and nothing but finite numbers and null."""
    step = record.get("step")
    return type(step) is int and step >= 0 and all(map(_is_finite, record.values()))


def _is_finite(value: object) -> bool:
    if type(value) is int:
        # JSON has integers that no float holds.
        return abs(value) < 2**63
    return value is None or (type(value) is float and math.isfinite(value))


def open_metrics(path: Path, resumed_step: int | None) -> tuple[LineFile, int]:
    """Open ``path`` to append; return it with the number of earlier starts that wrote lines.

    Drops the lines of steps that a run resumed from ``resumed_step`` will repeat. Damaged lines
    move to ``corrupt-metrics.jsonl-...``; what is not a file is quarantined.
    """
    restarts = 0
    # The lines stay as they are if this fails: who reads them skips what is damaged or repeated.
    with WriteAlarm().of(path):
        restarts = _clean(path, resumed_step)
    return LineFile(path), restarts


def _clean(path: Path, resumed_step: int | None) -> int:
    counts = [r.get("restarts") or 0 for r in drop_repeated(path, resumed_step, is_metrics)]
    return max((int(count) + 1 for count in counts), default=0)


def drop_repeated(
    path: Path, resumed_step: int | None, is_line: Callable[[dict[str, Any]], bool]
) -> list[dict[str, Any]]:
    """Drop lines of steps after ``resumed_step``, and move damaged lines to another file.

    Returns the records of all other lines, the dropped ones included. Lines that ``is_line``
    accepts have a step.
    """
    try:
        lines = read_lines(path)
    except OSError as error:
        if path.is_file():
            # Such as a network file system's error, or a file too large.
            logger.warning("%s: not read, so it keeps lines of repeated steps: %s", path, error)
        else:
            quarantine_file(path)
        return []
    good = [(line, record) for line, record in lines if is_line(record)]
    bad = [line for line, record in lines if not is_line(record)]
    last = math.inf if resumed_step is None else resumed_step
    kept = [line for line, record in good if record["step"] <= last]
    if bad:
        damaged = path.with_name(f"corrupt-{path.name}-{uuid.uuid4().hex[:8]}")
        with damaged.open("xb") as file:
            file.write(b"\n".join(bad) + b"\n")
        logger.warning("%s: %d damaged lines moved to %s", path, len(bad), damaged.name)
    if len(kept) < len(lines):
        atomic_write_text(path, b"".join(line + b"\n" for line in kept).decode(errors="replace"))
    return [record for _, record in good]
