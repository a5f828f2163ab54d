"""Output of this node's ranks: kept in ``logs/``, and shown as far as it is to be seen.

Ranks write to pipes, so that only the launcher writes to the terminal. A thread reads them. It
never waits for the terminal, which may be held (Ctrl-S), and so ranks do not either.
"""

import logging
import os
import re
import selectors
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from launcher.console import Console
from runtime.log import RECORD_MARK, plain_formatter, read_record
from runtime.printable import printable_lines
from runtime.run_folder import LineFile

POLL_SECONDS = 0.2
# A line that does not end within this time is shown, such as a debugger's prompt.
PARTIAL_SECONDS = 0.5
# A warning of a rank that is not shown waits for the same one of a rank that is.
HOLD_SECONDS = 1.0
CHUNK_BYTES, MAX_LINE_BYTES = 1 << 16, 1 << 20
# Notes of libraries that mean nothing to users. They are in logs/ only.
NOISE = re.compile(
    r"USDT:.*\bprofiler_(start|stop)$"  # Kineto, at each trace
    r"|\[?W\d{4} .* torch/distributed/elastic/.*(death signal|closing signal)"
    r"|\[?[IW]\d{4} .*(CuptiActivityProfiler|kineto)"
)


@dataclass
class _Stream:
    """One pipe of a rank."""

    rank: int
    is_error: bool
    is_shown: bool
    log: Path | None
    file: LineFile | None = None
    """The log, once it has a line that is no phase of the start."""
    phases: list[str] = field(default_factory=list)
    """Lines that wait for that one: a configuration that the rank rejects leaves no log."""
    rest: bytes = b""
    """Start of a line that has not ended."""
    since: float = field(default_factory=time.monotonic)


class RankOutput:
    """Reads the pipes of ranks in a thread."""

    def __init__(
        self, console: Console, logs: Path | None, *, followed: int, shows_warnings: bool
    ) -> None:
        """``followed``: the rank whose progress the live line shows, also if its log is not.

        ``shows_warnings``: show warnings of ranks that are not shown too, not only their errors.
        """
        self._console, self._logs, self._followed = console, logs, followed
        self._hidden_level = logging.WARNING if shows_warnings else logging.ERROR
        self._selector = selectors.DefaultSelector()
        self._shown_texts: set[str] = set()
        self._held: list[tuple[float, int, logging.LogRecord]] = []
        self._is_finished = threading.Event()
        self._formatter = plain_formatter()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def open(self, rank: int, *, is_error: bool, is_shown: bool) -> int:
        """Create the pipe of a rank's stdout or stderr; return the end that the rank gets."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        suffix = "err" if is_error else "out"
        log = None if self._logs is None else self._logs / f"rank-{rank}.{suffix}"
        stream = _Stream(rank, is_error, is_shown, log)
        self._selector.register(reader, selectors.EVENT_READ, stream)
        return writer

    def start(self) -> None:
        """Start to read, once all ranks have their pipes."""
        self._thread.start()

    def finish(self) -> None:
        """Read what the ranks left in the pipes, and close them."""
        self._is_finished.set()
        self._thread.join()

    def _read(self) -> None:
        while self._selector.get_map():
            is_finished = self._is_finished.is_set()
            ready = self._selector.select(0.0 if is_finished else POLL_SECONDS)
            for key, _ in ready:
                self._read_chunk(key.fd, key.data)
            now = time.monotonic()
            self._show_held(now, all_of_them=is_finished)
            for key in list(self._selector.get_map().values()):
                # A child of a rank may hold a pipe open.
                if is_finished and not ready:
                    self._end(key.fd, key.data)
                else:
                    self._show_partial(key.data, now)
        self._show_held(time.monotonic(), all_of_them=True)

    def _read_chunk(self, descriptor: int, stream: _Stream) -> None:
        data = os.read(descriptor, CHUNK_BYTES)
        if not data:
            self._end(descriptor, stream)
            return
        *lines, stream.rest = (stream.rest + data).split(b"\n")
        stream.since = time.monotonic()
        for line in lines:
            self._take(stream, line)
        if len(stream.rest) > MAX_LINE_BYTES:
            self._take(stream, stream.rest)
            stream.rest = b""

    def _end(self, descriptor: int, stream: _Stream) -> None:
        self._selector.unregister(descriptor)
        os.close(descriptor)
        if stream.rest:
            self._take(stream, stream.rest)
        if stream.file is not None:
            stream.file.close()

    def _show_partial(self, stream: _Stream, now: float) -> None:
        is_whole = not stream.rest or RECORD_MARK.encode() in stream.rest
        if stream.is_shown and not is_whole and now - stream.since > PARTIAL_SECONDS:
            self._take(stream, stream.rest)
            stream.rest = b""

    def _take(self, stream: _Stream, data: bytes) -> None:
        """Keep a line, and show it if it is to be seen."""
        text = data.decode(errors="backslashreplace")
        record = read_record(text)
        before, mark, after = data.rpartition(RECORD_MARK.encode())
        if record is None and before and read_record((mark + after).decode(errors="replace")):
            # The user's own code printed text without the end of its line.
            self._take(stream, before)
            self._take(stream, mark + after)
            return
        is_raw = record is None
        if record is None:
            attributes = {"msg": text, "is_error": stream.is_error, "levelno": logging.INFO}
            record = logging.makeLogRecord(attributes | {"is_raw": True})
        if stream.log is not None and record.levelno > logging.DEBUG:
            line = printable_lines(text) if is_raw else self._formatter.format(record)
            self._keep(stream, stream.log, line, is_phase="phase" in getattr(record, "event", {}))
        if record.levelno == logging.DEBUG:
            if stream.rank == self._followed:
                self._console.show(record)
        elif stream.is_shown:
            if record.levelno >= logging.WARNING:
                self._shown_texts.add(record.getMessage())
            if not (is_raw and NOISE.match(text)):
                self._console.show(record)
        elif stream.rank == self._followed and hasattr(record, "event"):
            # Of a node whose log is not shown, the live line tells where the run is.
            record.levelno = logging.DEBUG
            self._console.show(record)
        elif record.levelno >= self._hidden_level:
            self._held.append((time.monotonic() + HOLD_SECONDS, stream.rank, record))

    @staticmethod
    def _keep(stream: _Stream, log: Path, line: str, *, is_phase: bool) -> None:
        if is_phase and stream.file is None:
            stream.phases.append(line)
            return
        stream.file = stream.file or LineFile(log)
        for text in (*stream.phases, line):
            stream.file.write(text)
        stream.phases.clear()

    def _show_held(self, now: float, *, all_of_them: bool) -> None:
        """Show warnings and errors of hidden ranks that no other rank has shown."""
        waiting = []
        for until, rank, record in self._held:
            text = record.getMessage()
            if not all_of_them and now < until:
                waiting.append((until, rank, record))
            elif text not in self._shown_texts:
                self._shown_texts.add(text)
                record.msg = f"rank {rank}: {text}"
                self._console.show(record)
        self._held = waiting
