"""Warnings and alarms of a run: kept in ``alarms.jsonl``, and passed on to trackers."""

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime.log import logger
from runtime.run_folder import LineFile

ALARM, WARNING = "alarm", "warning"


class AlarmHandler(logging.Handler):
    """Passes the log's warnings and alarms on while it is open, with ALARM or WARNING first."""

    def __init__(self, take: Callable[[str, str], None]) -> None:
        super().__init__(logging.WARNING)
        self._take, self._is_busy = take, False
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        # What takes it may log an error itself; other threads wait for the handler's lock.
        if not self._is_busy:
            self._is_busy = True
            try:
                kind = ALARM if record.levelno >= logging.ERROR else WARNING
                self._take(kind, record.getMessage())
            finally:
                self._is_busy = False

    def close(self) -> None:
        logger.removeHandler(self)
        super().close()


class AlarmsFile:
    """Appends warnings and alarms with their step. Those of steps that are repeated later stay."""

    def __init__(self, path: Path, step: int) -> None:
        """``step``: the newest one that is done."""
        self._path, self._step = path, step
        self._file: LineFile | None = None
        self._handler = AlarmHandler(self._write)

    def end_step(self, step: int) -> None:
        """Count what follows to the step after ``step``."""
        self._step = step

    def _write(self, kind: str, text: str) -> None:
        line = {"step": self._step, "time": time.time(), "kind": kind, "text": text}
        self._file = self._file or LineFile(self._path)
        self._file.write(json.dumps(line))

    def close(self) -> None:
        self._handler.close()
        if self._file is not None:
            self._file.close()


def is_alarm(record: dict[str, Any]) -> bool:
    """True if the object may be a line."""
    step, seconds = record.get("step"), record.get("time")
    is_placed = type(step) is int and step >= 0 and type(seconds) in (int, float)
    return is_placed and record.get("kind") in (ALARM, WARNING) and type(record.get("text")) is str
