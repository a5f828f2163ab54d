"""Files of a run besides its checkpoints' contents: metrics, the ledger, ``control/``.

No damage to them stops a run. Readers skip and report what is damaged; they neither block nor
follow links, and read a bounded size. A write that fails is an alarm.
"""

import errno
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from runtime.filesystem import (
    make_folder,
    open_file,
    parse_object,
    quarantine_file,
    read_file,
    replaced_file,
)
from runtime.log import logger, say

# Bounds besides those of read_file: a ledger is read line by line.
MAX_LEDGER_BYTES, MAX_LINE_BYTES, MAX_TEXT_BYTES = 1 << 34, 1 << 24, 1 << 10
TIME = "%Y-%m-%dT%H:%M:%S%z"
OLD_STOP = "OLD_STOP"
"""Environment variable: ``stop_file_id`` before this start, of a file that is no request to it."""


def timestamp() -> str:
    """Local time with its zone, as in the run's JSON files."""
    return time.strftime(TIME)


def unix_time(stamp: str) -> float | None:
    """Seconds since the epoch; None if ``stamp`` is none of ``timestamp``."""
    try:
        return datetime.strptime(stamp, TIME).timestamp()
    except (ValueError, OverflowError):
        return None


def list_checkpoints(folder: Path) -> list[Path]:
    """Committed checkpoints in ``folder``, newest first; none if there is no such folder.

    Raises ``OSError`` if it cannot be listed: a run that took it for empty would begin again.
    """
    try:
        names = os.listdir(folder)  # ``Path.glob`` would take an error for an empty folder.
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [folder / name for name in names if re.fullmatch(r"step-\d{8,}", name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    """Training step in the name of a checkpoint's folder."""
    return int(folder.name.removeprefix("step-"))


def iterate_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file of up to MAX_LEDGER_BYTES; pieces of those above MAX_LINE_BYTES.

    Raises ``OSError`` as ``read_file`` does.
    """
    with open_file(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > MAX_LEDGER_BYTES:
            text = f"{size:,} bytes, more than {MAX_LEDGER_BYTES:,}"
            raise OSError(errno.EFBIG, text, str(path))
        while line := file.readline(MAX_LINE_BYTES):
            yield line


def read_text(path: Path) -> str:
    """First line of a control file, stripped; "" if it is missing or unreadable."""
    try:
        with open_file(path) as file:
            text = file.read(MAX_TEXT_BYTES).decode(errors="replace").strip()
    except OSError:
        return ""
    return text.partition("\n")[0]


def read_number(path: Path) -> int | None:
    """Whole number in a control file; None if it has none."""
    text = read_text(path)
    # Python raises on thousands of digits.
    is_number = text.isascii() and text.isdecimal() and len(text) < 20
    return int(text) if is_number else None


def read_lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Lines of a JSON-lines file, each with its object: {} if it is damaged.

    Empty if the file is missing; raises ``OSError`` as ``read_file`` does.
    """
    try:
        content = read_file(path)
    except FileNotFoundError:
        return []
    lines = [line for line in content.split(b"\n") if line.strip()]
    return [(line, parse_object(line.decode(errors="replace"))) for line in lines]


def read_records(
    path: Path, is_record: Callable[[dict[str, Any]], bool] = bool
) -> tuple[list[dict[str, Any]], list[str]]:
    """Objects of a JSON-lines file, and at most one problem: the file, or its damaged lines.

    Those that ``is_record`` declines are damaged too.
    """
    try:
        lines = read_lines(path)
    except OSError as error:
        return [], [f"{path}: {error.strerror or error}"]
    return records_of(path, [record if is_record(record) else {} for _, record in lines])


def records_of(path: Path, records: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Split the records of ``path`` into those that are not empty, and at most one problem."""
    damaged = [number for number, record in enumerate(records, start=1) if not record]
    text = f"{path}:{damaged[0]}: torn line ({len(damaged)} in all)" if damaged else ""
    return [record for record in records if record], [text] * bool(damaged)


def remove_file(path: Path) -> None:
    """Delete a control file; a folder in its place is quarantined. A failure is an alarm."""
    try:
        if path.is_dir() and not path.is_symlink():
            quarantine_file(path)
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.error("ALARM: %s was not deleted: %s", path, error)


def stop_file_id(control: Path) -> str:
    """Identity of the present ``stop``; "" if there is none."""
    try:
        status = (control / "stop").lstat()
    except OSError:
        return ""
    return f"{status.st_ino}:{status.st_mtime_ns}"


def remove_stop_file(control: Path, old: str) -> None:
    """Delete ``stop`` if it is still the ``old`` one, which asked an earlier start to end."""
    if old and stop_file_id(control) == old:
        say("control/stop is from before this start: removed", file=sys.stderr)
        remove_file(control / "stop")


class WriteAlarm:
    """Logs the first of consecutive errors of writes, and when a write succeeds again."""

    def __init__(self) -> None:
        self._failed = 0

    @contextmanager
    def of(self, path: Path) -> Iterator[None]:
        """Context of one write to ``path``: an ``OSError`` in it is logged, not raised."""
        try:
            yield
        except OSError as error:
            if self._failed == 0:
                logger.error("ALARM: %s was not written: %s", path, error)
            self._failed += 1
        else:
            if self._failed:
                logger.warning("%s: written again; %d writes failed", path, self._failed)
            self._failed = 0


class LineFile:
    """A file to which whole lines are appended: after a failed write, the line is missing.

    What is no regular file is quarantined. A file that was removed meanwhile is made again.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._alarm = path, WriteAlarm()
        self._file: BinaryIO | None = None
        with self._alarm.of(path):
            self._open()

    def write(self, line: str) -> bool:
        """Append a line; False if that failed. It survives a kill, not a power cut."""
        data = (line + "\n").encode()
        with self._alarm.of(self._path):
            if self._file is not None and not is_file_at(self._file.fileno(), self._path):
                logger.error("ALARM: %s was removed, with its lines", self._path)
                self.close()
            descriptor = (self._file or self._open()).fileno()
            size = os.fstat(descriptor).st_size
            try:
                # A write that finds some room is short, and the next one raises.
                while data:
                    data = data[os.write(descriptor, data) :]
            except OSError:
                # The next write opens it again, after a torn line if this fails too.
                with suppress(OSError):
                    os.ftruncate(descriptor, size)
                self.close()
                raise
            return True
        return False

    def sync(self) -> None:
        """Flush the file to disk (fsync)."""
        if self._file is not None:
            with self._alarm.of(self._path):
                os.fsync(self._file.fileno())

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # Nothing is buffered.
                file.close()

    def _open(self) -> BinaryIO:
        if not self._path.parent.is_dir():
            make_folder(self._path.parent)
        try:
            file = open_file(self._path, "ab+")
        except OSError:
            if not os.path.lexists(self._path):
                raise
            if self._path.is_file() and self._path.lstat().st_nlink > 1:
                # A copy of the folder may share its files.
                with replaced_file(self._path) as scratch:
                    shutil.copyfile(self._path, scratch)
            else:
                quarantine_file(self._path)
            file = open_file(self._path, "ab+")
        size = os.fstat(file.fileno()).st_size
        # A kill may have left a torn line.
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            os.write(file.fileno(), b"\n")
        self._file = file
        return file


def is_file_at(descriptor: int, path: Path) -> bool:
    """False if ``path`` names the open file no more, because it was removed or replaced."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # An error of the file system, which the next look may not meet.
        return True
