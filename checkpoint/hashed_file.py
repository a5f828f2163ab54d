"""Files of a checkpoint, hashed as they are written and read. Imports no torch."""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar

import xxhash

from runtime.filesystem import open_file

T = TypeVar("T")
# Of an ``OSError`` that says what the file is: ext4 and XFS give the last two for damaged metadata.
# Others, such as a stale handle of NFS, a server that does not answer, or too many open files, say
# nothing about it.
DAMAGE = {
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.EFBIG, errno.EIO,
    errno.EBADMSG, getattr(errno, "EUCLEAN", errno.EIO),
}  # fmt: skip


def read_checked(read: Callable[[], T]) -> T:
    """Return ``read()``. Raises ``ValueError`` if its ``OSError`` says that the file is damaged.

    Another ``OSError`` is raised as it is: a good checkpoint must not be taken for a damaged one.
    An I/O error must come twice, because Lustre gives one to each client that it had evicted.
    """
    try:
        try:
            return read()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return read()
    except OSError as error:
        if error.errno not in DAMAGE:
            raise
        raise ValueError(error.strerror) from error


class HashedFile:
    """A new file that hashes the bytes in memory as it writes them.

    A context manager: without ``close`` before, leaving it closes the file. Raises
    ``FileExistsError`` if ``path`` exists.
    """

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("xb")
        self._digest = xxhash.xxh3_128()
        self.size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        # After a failed write, closing the file may fail too.
        with suppress(OSError):
            self._file.close()

    def write(self, data: bytes | memoryview) -> None:
        self._digest.update(data)
        self._file.write(data)
        self.size += len(data)

    def close(self) -> dict[str, Any]:
        """Fsync and close the file; return its size in bytes and its hash."""
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        return {"size": self.size, "xxh3_128": self._digest.hexdigest()}


def write_hashed(path: Path, content: bytes) -> dict[str, Any]:
    """Write and fsync a new file; return its size and hash."""
    with HashedFile(path) as file:
        file.write(content)
        return file.close()


def describe_file(
    path: Path, raise_if_stopped: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Size in bytes and hash of a file, in the form that ``HashedFile.close`` returns.

    ``raise_if_stopped`` is called for each block of 4 MiB.
    """
    digest = xxhash.xxh3_128()
    size = 0
    with open_file(path) as file:
        while block := file.read(1 << 22):
            raise_if_stopped()
            digest.update(block)
            size += len(block)
    return {"size": size, "xxh3_128": digest.hexdigest()}
