"""Data files, wherever they are: local paths, and URLs with a local copy where one is needed.

Readers use paths of both kinds alike. Formats that are read in the order of the file, and Parquet,
are read from the server. Text, Arrow and token ids are read at random places, which would take a
request per document: their files are copied once per node, before the first step.
"""

import fcntl
import hashlib
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from config.paths import is_url
from data.remote import MAX_RANGE_BYTES, Facts, RangeReader, RemoteFile
from data.remote_errors import StorageError
from runtime.filesystem import fsync_folder, open_input, read_input
from runtime.log import logger
from runtime.run_lock import lock_error_text

DataPath = Path | RemoteFile
T = TypeVar("T")
P = TypeVar("P")

# Requests that are under way at once, of one file and for several files.
THREADS_PER_FILE, FILE_THREADS = 4, 8


def data_path(text: str, facts: Facts | None = None) -> DataPath:
    """Return the file of a path or URL."""
    return RemoteFile(text, facts) if is_url(text) else Path(text)


def open_data(path: DataPath) -> BinaryIO:
    """Open a regular file; raise ``OSError`` for a pipe or a device."""
    return path.open() if isinstance(path, RemoteFile) else open_input(path)


def read_data(path: DataPath) -> bytes:
    """Read a regular file; raise ``OSError`` for a pipe or a device."""
    return path.open().read() if isinstance(path, RemoteFile) else read_input(path)


def open_for_arrow(path: DataPath) -> Path | RangeReader:
    """Return what ``pyarrow`` opens to read parts of a file: its path if it is local."""
    return RangeReader(path) if isinstance(path, RemoteFile) else path


def check_size(path: DataPath, size: int) -> None:
    """Raise ``StorageError`` if the file has another size by now."""
    now = path.stat().st_size
    if now != size:
        text = f"data.path: {path} changed from {size:,} to {now:,} bytes while it was read"
        raise StorageError(text, is_final=True)


def version_keys(path: DataPath) -> dict[str, Any]:
    """Return JSON values that differ for another file, or another version of it."""
    if isinstance(path, RemoteFile):
        facts = path.stat()
        return {"path": path.url, "size": facts.st_size, "time": facts.version}
    status = path.stat()
    # Copies and archives set the time of modification, but not that of the change.
    time = f"{status.st_mtime_ns} {status.st_ctime_ns}"
    return {"path": str(path.resolve()), "size": status.st_size, "time": time}


def versioned_path(path: str, size: int, time: str) -> DataPath:
    """Return the file of ``version_keys``."""
    facts = Facts(size, 0.0, time, st_ino=path)
    return data_path(path, facts if is_url(path) else None)


def for_each(function: Callable[[P], T], items: Sequence[P], *, of: DataPath) -> list[T]:
    """Call ``function`` for all ``items``, in threads if files like ``of`` are remote."""
    if not isinstance(of, RemoteFile):
        return [function(item) for item in items]
    with ThreadPoolExecutor(FILE_THREADS) as threads:
        return list(threads.map(function, items))


def local_path(path: DataPath) -> Path:
    """Return a local file, or the local copy of a remote one, which is made if there is none.

    The first process of a node that needs it makes it, and the others wait. Raises as
    ``RemoteFile.stat`` does, and ``OSError`` if the copy cannot be written.
    """
    if not isinstance(path, RemoteFile):
        return path
    copy = _copy_of(path)
    if not _is_whole(copy, path):
        with cache_lock(copy):
            if not _is_whole(copy, path):
                _download(path, copy)
    return copy


def cache_folder() -> Path:
    """Return the folder of the node's copies, beside those of the Hugging Face Hub."""
    # Imported here, because huggingface_hub takes a moment to import.
    from runtime.hub_cache import HF_HOME

    return Path(HF_HOME) / "shardloom"


def cache_file(name: str) -> Path:
    """Return a path of the node's cache."""
    return cache_folder() / name


@contextmanager
def cache_lock(path: Path) -> Iterator[None]:
    """Wait until no other process of the node is making the file ``path`` of the cache."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise OSError(error.errno, lock_error_text(Path(lock.name), error)) from None
        yield


def copy_remote(paths: Iterable[DataPath]) -> None:
    """Make the local copies of all remote files among ``paths``; see ``local_path``."""
    remote = [path for path in paths if isinstance(path, RemoteFile)]
    if not remote:
        return
    for_each(RemoteFile.stat, remote, of=remote[0])
    missing = [path for path in remote if not _is_whole(_copy_of(path), path)]
    size = sum(path.stat().st_size for path in missing)
    if missing:
        cache = cache_folder()
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        free = shutil.disk_usage(cache).free
        what = f"{len(missing):,} files with {size:,} bytes"
        # Those that a process was killed in, or that another of the node is making.
        begun = sum(_size_on_disk(_part_of(_copy_of(path))) for path in missing)
        if size > free + begun:
            text = f"{missing[0]}: {what} do not fit into {cache}, which has {free:,} free"
            raise StorageError(f"data: {text}; the environment variable HF_HOME moves it")
        logger.info("data: copying %s to %s, the first %s", what, cache, missing[0])
    for_each(local_path, missing, of=remote[0])


def _copy_of(path: RemoteFile) -> Path:
    facts = path.stat()
    key = f"{path.url} {facts.st_size} {facts.version}"
    # File systems limit the bytes of a name, not its characters.
    name = os.fsencode(path.name)[-100:].decode(errors="ignore")
    return cache_file(f"{hashlib.sha256(key.encode()).hexdigest()[:32]}-{name}")


def _part_of(copy: Path) -> Path:
    """Return the file that ``copy`` is written to until it is whole."""
    # Locks of some shared file systems do not hold between nodes, so each node has its own file.
    # Within the node the lock holds: a file of that name is of a process that was killed.
    return copy.with_name(f"{copy.name}.{socket.gethostname()}.part")


def _size_on_disk(path: Path) -> int:
    """Bytes that the file takes, 0 if there is none."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _is_whole(copy: Path, path: RemoteFile) -> bool:
    return copy.exists() and copy.stat().st_size == path.stat().st_size


def _download(path: RemoteFile, copy: Path) -> None:
    """Copy a remote file. The copy gets its name only when it is complete."""
    size, scratch = path.stat().st_size, _part_of(copy)
    with scratch.open("wb") as file:
        write = partial(_write_range, path, file.fileno(), size)
        with ThreadPoolExecutor(THREADS_PER_FILE) as threads:
            list(threads.map(write, range(0, size, MAX_RANGE_BYTES)))
        path.check_version()
        os.fsync(file.fileno())
    scratch.rename(copy)
    fsync_folder(copy.parent)


def _write_range(path: RemoteFile, descriptor: int, size: int, start: int) -> None:
    content = path.read_range(start, min(start + MAX_RANGE_BYTES, size))
    if os.pwrite(descriptor, content, start) != len(content):
        raise OSError(f"{path}: its copy cannot be written")
