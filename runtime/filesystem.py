"""A run's files: opened without following links, replaced atomically, and fsynced.

A run's folder, or what contains it, may be a symbolic link. Nothing that a run writes in its folder
may be one: who can write there, or made the archive it came from, could choose which file elsewhere
is written or deleted.
"""

import errno
import json
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, cast

from runtime.log import logger

RUN_FILES = ("alarms.jsonl", "config.toml", "metrics.jsonl", "run_id", "samples.jsonl")
RUN_FOLDERS = (
    *("checkpoints", "control", "ledger", "logs", "provenance", "tensorboard", "traces", "wandb"),
)
# Bound on files that are read as a whole; a file of any size costs nothing if it is sparse.
MAX_BYTES = 1 << 30
FLAGS = {
    "rb": os.O_RDONLY,
    "wb": os.O_WRONLY | os.O_CREAT,
    "ab+": os.O_RDWR | os.O_CREAT | os.O_APPEND,
}


def check_run_folder(folder: Path) -> None:
    """Raise ``OSError`` if anything that a run writes in ``folder`` is a symbolic link."""
    for name in (*RUN_FILES, *RUN_FOLDERS):
        reject_link(folder / name)
    for pattern in ("control/*", "ledger/*"):
        for path in folder.glob(pattern):
            reject_link(path)


def reject_link(path: Path) -> None:
    """Raise ``OSError`` if ``path`` is a symbolic link."""
    if path.is_symlink():
        text = "a symbolic link, which is not followed; only the run's folder may be one"
        raise OSError(errno.ELOOP, text, str(path))


def make_folder(folder: Path) -> None:
    """Create a folder of a run, such as ``control/``, and its parent, with mode 0700.

    Quarantines a file in the place of ``folder``. Raises ``OSError`` for a symbolic link.
    """
    reject_link(folder)
    if folder.exists() and not folder.is_dir():
        quarantine_file(folder)
    for path in (folder.parent, folder):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)


def open_file(path: Path, mode: str = "rb") -> BinaryIO:
    """Open a regular file; ``mode`` is rb, wb or ab+.

    Raises ``OSError`` for a symbolic link, a pipe or a device and, to write, for a file with a
    second hard link, which may be a file elsewhere.
    """
    flags = FLAGS[mode] | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError:
        reject_link(path)
        raise
    status = os.fstat(descriptor)
    problem = "" if stat.S_ISREG(status.st_mode) else "not a regular file"
    if mode != "rb" and status.st_nlink > 1:
        problem = f"{status.st_nlink} hard links to this file; replace this one by a copy"
    if problem:
        os.close(descriptor)
        raise OSError(errno.EINVAL, problem, str(path))
    if mode == "wb":
        os.ftruncate(descriptor, 0)
    return cast(BinaryIO, os.fdopen(descriptor, mode))


def read_file(path: Path, most: int = MAX_BYTES) -> bytes:
    """Read a regular file of at most ``most`` bytes; raise ``OSError`` as ``open_file`` does."""
    with open_file(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise OSError(errno.EFBIG, f"{size:,} bytes, more than {most:,}", str(path))
        return file.read()


def open_input(path: Path) -> BufferedReader:
    """Open a regular file of the user to read, through links.

    Raises ``OSError`` for a pipe or a device, which might never end.
    """
    return cast(BufferedReader, open_file(Path(os.path.realpath(path))))


def read_input(path: Path) -> bytes:
    """Read a regular file of the user, through links; raise ``OSError`` as ``open_input`` does."""
    return read_file(Path(os.path.realpath(path)))


def parse_object(line: bytes | str) -> dict[str, Any]:
    """Parse a JSON object; {} if it is torn, something else, or nested too deep."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def atomic_write_text(path: Path, text: str) -> None:
    """Replace a file atomically: even after a power cut, it has the old or the new text."""
    scratch = path.with_name(f".{path.name}")
    # A killed process may have left it.
    scratch.unlink(missing_ok=True)
    with scratch.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    if path.is_dir() and not path.is_symlink():
        quarantine_file(path)
    os.replace(scratch, path)


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Yield a path in a new folder beside ``path``; on success, its file replaces ``path``.

    For libraries that write to a path, and would follow a link.
    """
    with TemporaryDirectory(prefix=".tmp-", dir=path.parent) as folder:
        scratch = Path(folder) / path.name
        yield scratch
        os.replace(scratch, path)


def quarantine_file(path: Path) -> None:
    """Rename what is in the place of a run's file or folder, and cannot be used as such."""
    renamed = path.rename(path.with_name(f"corrupt-{path.name}-{uuid.uuid4().hex[:8]}"))
    logger.warning("%s: cannot be used; quarantined as %s", path, renamed.name)


def fsync_folder(folder: Path) -> None:
    """Fsync a directory, so that renames in it survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
