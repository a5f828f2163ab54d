"""Warnings and alarms of a run: kept in ``alarms.jsonl``, and passed on to trackers."""

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime.log import logger
from runtime.run_folder import LineFile

ALARM, WARNING = "alarm", "warning"
# Kept in memory until there is room for them on the disk.
MAX_PENDING = 1000


class AlarmHandler(logging.Handler):
    """Passes the log's warnings and alarms on while it is open, with ALARM or WARNING first."""

    # One for all: two threads whose handlers log would wait for each other's.
    _lock_of_all = threading.RLock()

    def createLock(self) -> None:
        self.lock = self._lock_of_all

    def __init__(self, take: Callable[[str, str], None]) -> None:
        super().__init__(logging.WARNING)
        self._take, self._is_busy = take, False
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        kind = ALARM if record.levelno >= logging.ERROR else WARNING
        self.call(lambda: self._take(kind, record.getMessage()))

    def call(self, work: Callable[[], None]) -> None:
        """Call ``work``. What it logs itself is not passed on, and other threads wait."""
        self.acquire()
        try:
            if not self._is_busy:
                self._is_busy = True
                try:
                    work()
                finally:
                    self._is_busy = False
        finally:
            self.release()

    def close(self) -> None:
        logger.removeHandler(self)
        super().close()


class AlarmsFile:
    """Appends warnings and alarms with their step. Those of steps that are repeated later stay.

    What a full disk has no room for is written after a later step. Warnings of the start are
    written by the first ``end_step``.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._step: int | None = None
        self._pending: deque[dict[str, Any]] = deque(maxlen=MAX_PENDING)
        self._file: LineFile | None = None
        self._handler = AlarmHandler(self._take)

    def end_step(self, step: int) -> None:
        """Count what follows to ``step``, the newest one that is done."""
        self._step = step
        if self._pending:
            self._handler.call(self._write)

    def _take(self, kind: str, text: str) -> None:
        record = {"time": time.time(), "kind": kind, "text": text}
        if self._step is None:
            self._pending.append(record)
        else:
            self._pending.append({"step": self._step} | record)
            self._write()

    def _write(self) -> None:
        self._file = self._file or LineFile(self._path)
        # A run that resumes knows its step only after the first warnings.
        while self._pending and self._file.write(
            json.dumps({"step": self._step} | self._pending[0])
        ):
            self._pending.popleft()

    def close(self) -> None:
        if self._pending and self._step is not None:
            self._handler.call(self._write)
        self._handler.close()
        if self._file is not None:
            self._file.close()


def is_alarm(record: dict[str, Any]) -> bool:
    """True if the object may be a line."""
    step, seconds = record.get("step"), record.get("time")
    is_placed = type(step) is int and step >= 0 and type(seconds) in (int, float)
    return is_placed and record.get("kind") in (ALARM, WARNING) and type(record.get("text")) is str
