"""Console of a run: the launcher alone writes to the terminal.

Records and lines wait in a queue for a thread that draws them, so that a terminal that is held or
slow delays neither ranks nor their watching. On a terminal there is a live line below the log
(``launcher/screen.py``); a pipe, a file and a dumb terminal get plain lines.
"""

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, Self

from runtime.log import logger, plain_formatter

# Bounds how far the screen may fall behind.
MAX_RECORDS = 10_000
# Seconds between drawings of the live line.
DRAW_SECONDS, IDLE_SECONDS = 0.25, 1.0
# Seconds to wait at the end for a terminal that is held.
CLOSE_SECONDS = 5.0
# A pipe learns of phases of the start that take longer.
SLOW_PHASE_SECONDS = 2.0


class Screen(Protocol):
    """Display of records. All methods may raise ``OSError`` once the terminal is gone."""

    def show(self, records: list[logging.LogRecord]) -> None: ...
    def tick(self) -> None: ...  # redraw what changes with time
    def clear(self) -> None: ...  # remove what is not to stay


class Console(logging.Handler):
    """Shows records of ranks and of the launcher's own logger, in a thread."""

    def __init__(self, screen: Screen) -> None:
        super().__init__()
        self._screen = screen
        self._records = deque[logging.LogRecord]()
        self._n_dropped, self._is_closed = 0, False
        self._changed = threading.Condition()
        self._screen_lock = threading.Lock()
        self._thread = threading.Thread(target=self._draw, daemon=True)
        self._previous: tuple[list[logging.Handler], int, bool] = ([], 0, True)

    def __enter__(self) -> Self:
        self._previous = logger.handlers, logger.level, logger.propagate
        logger.handlers, logger.propagate = [self], False
        logger.setLevel(logging.DEBUG)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        logger.handlers, level, logger.propagate = self._previous
        logger.setLevel(level)
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(CLOSE_SECONDS)

    def emit(self, record: logging.LogRecord) -> None:
        self.show(record)

    def show(self, record: logging.LogRecord) -> None:
        """Queue a record. Never waits for the terminal."""
        with self._changed:
            if len(self._records) == MAX_RECORDS:
                self._records.popleft()
                self._n_dropped += 1
            self._records.append(record)
            self._changed.notify()

    @contextmanager
    def suspended(self, text: str) -> Iterator[None]:
        """Context in which the shell has the terminal, after the line ``text``."""
        has_lock = self._screen_lock.acquire(timeout=IDLE_SECONDS)
        try:
            with self._ignoring_a_lost_terminal():
                self._screen.show([logging.makeLogRecord({"msg": text, "levelno": logging.INFO})])
                self._screen.clear()
            yield
        finally:
            if has_lock:
                self._screen_lock.release()

    def _draw(self) -> None:
        drawn_at, is_closed = 0.0, False
        while not is_closed or self._records:
            with self._changed:
                if not self._records and not self._is_closed:
                    self._changed.wait(IDLE_SECONDS)
                is_closed = self._is_closed
                lines = [record for record in self._records if record.levelno > logging.DEBUG]
            # Steps may be many in a second: draw the newest only.
            rest = drawn_at + DRAW_SECONDS - time.monotonic()
            if not lines and not is_closed and rest > 0:
                time.sleep(rest)
            with self._screen_lock, self._ignoring_a_lost_terminal():
                self._screen.show(self._take())
                self._screen.tick()
            drawn_at = time.monotonic()
        with self._ignoring_a_lost_terminal():
            self._screen.clear()

    def _take(self) -> list[logging.LogRecord]:
        with self._changed:
            records, self._records = list(self._records), deque()
            n_dropped, self._n_dropped = self._n_dropped, 0
        if n_dropped:
            text = f"console: {n_dropped} records are not shown, because it was held: see logs/"
            records.insert(0, logging.makeLogRecord({"msg": text, "levelno": logging.WARNING}))
        return records

    @contextmanager
    def _ignoring_a_lost_terminal(self) -> Iterator[None]:
        try:
            yield
        except OSError:  # SIGHUP or the reader's end is not for the console to judge.
            self._screen = NoScreen()


class PlainScreen:
    """Whole lines with date and time, for pipes, files and dumb terminals."""

    def __init__(self) -> None:
        self._formatter = plain_formatter()
        self._phase: tuple[float, logging.LogRecord] | None = None

    def show(self, records: list[logging.LogRecord]) -> None:
        for record in records:
            event = getattr(record, "event", {})
            is_raw = getattr(record, "is_raw", False)
            if "phase" in event:
                is_hidden = record.levelno == logging.DEBUG
                self._phase = None if is_hidden else (time.monotonic(), record)
                continue
            self._phase = None
            if is_raw:
                descriptor = 2 if getattr(record, "is_error", False) else 1
                write_all(descriptor, f"{record.getMessage()}\n")
            elif record.levelno > logging.DEBUG:
                write_all(1, f"{self._formatter.format(record)}\n")

    def tick(self) -> None:
        """Name a phase of the start that takes long."""
        if self._phase is not None and time.monotonic() - self._phase[0] > SLOW_PHASE_SECONDS:
            write_all(1, f"{self._formatter.format(self._phase[1])}\n")
            self._phase = None

    def clear(self) -> None: ...


class NoScreen:
    """In place of a terminal or pipe that is gone."""

    def show(self, records: list[logging.LogRecord]) -> None: ...
    def tick(self) -> None: ...
    def clear(self) -> None: ...


def write_all(descriptor: int, text: str) -> None:
    """Write ``text`` past Python's buffers, whose flush at exit would fail for a lost terminal."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    data = text.encode(encoding, errors="backslashreplace")
    while data:
        data = data[os.write(descriptor, data) :]


def is_terminal(descriptor: int) -> bool:
    """True if a live line is possible there."""
    return os.isatty(descriptor) and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
