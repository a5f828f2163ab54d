"""Files of object stores and web servers, read by byte ranges through ``fsspec``.

A file is read as it was when it was first asked for: another ETag, size or time of modification is
an error. Requests that fail are repeated for ``RETRY_SECONDS``.
"""

import errno
import io
import os
from collections.abc import Iterator, Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache, partial
from pathlib import PurePosixPath
from stat import S_IFREG
from typing import Any, BinaryIO, NamedTuple, cast
from urllib.parse import unquote

from data.remote_errors import StorageError, masked, repeated
from runtime.commands import install_text

# Bytes of the first request of a reader. Each following one, if it reads on, has twice as many.
MIN_RANGE_BYTES, MAX_RANGE_BYTES = 1 << 16, 1 << 23
# Names that file systems give to what changes with the contents, and to the time of that.
VERSION_KEYS = ("ETag", "etag", "blob_id", "Content-MD5")
TIME_KEYS = ("LastModified", "last_modified", "Last-Modified", "updated", "mtime", "created")


class Facts(NamedTuple):
    """Facts on one version of a file, named as in ``os.stat_result``."""

    st_size: int
    st_ctime: float
    """Seconds since the epoch when it was written; 0.0 if unknown."""
    version: str
    """Changes with the contents; "" if the server sends no such thing."""
    st_mode: int = S_IFREG
    st_dev: int = 0
    st_ino: str = ""
    """The URL, which identifies a file."""


class RemoteFile:
    """A file that a URL names: the part of ``pathlib.Path`` that readers use."""

    def __init__(self, url: str, facts: Facts | None = None, *, is_folder: bool = False) -> None:
        self.url, self._facts, self._is_folder = url, facts, is_folder
        self._related: dict[str, RemoteFile] = {}

    def __str__(self) -> str:
        return self.url

    def __lt__(self, other: "RemoteFile") -> bool:
        """Order by parts, like paths."""
        return self.url.split("/") < other.url.split("/")

    def __truediv__(self, name: str) -> "RemoteFile":
        return self._relative(f"{self.url.rstrip('/')}/{name}")

    def with_suffix(self, suffix: str) -> "RemoteFile":
        return self._relative(self.url.removesuffix(self.suffix) + suffix)

    def _relative(self, url: str) -> "RemoteFile":
        # One object for each, so that its facts are requested once.
        return self._related.setdefault(url, RemoteFile(url))

    @property
    def name(self) -> str:
        return self.relative_to(os.path.dirname(self.url)).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def suffixes(self) -> list[str]:
        return PurePosixPath(self.name).suffixes

    def relative_to(self, root: str) -> PurePosixPath:
        """Path below the URL ``root``, as a local copy of that folder would have it."""
        path = self.url[len(root) :].lstrip("/")
        return PurePosixPath(unquote(path) if is_http(self.url) else path)

    def as_json(self) -> list[Any]:
        """Return the arguments of ``from_json``."""
        return [self.url, self._is_folder, *(self._facts or ())]

    @classmethod
    def from_json(cls, url: str, is_folder: bool, *facts: Any) -> "RemoteFile":
        """Return the file of ``as_json``, without a request."""
        return cls(url, Facts(*facts) if facts else None, is_folder=is_folder)

    def is_dir(self) -> bool:
        return self._is_folder

    def exists(self) -> bool:
        try:
            self.stat()
        except FileNotFoundError:
            return False
        return True

    def stat(self) -> Facts:
        """Return the facts of the version that is read; raise as ``repeated`` does."""
        if self._facts is None:
            self._facts = request_facts(self.url)
        return self._facts

    def open(self, mode: str = "rb") -> BinaryIO:
        """Open for reading; raise as ``repeated`` does."""
        assert mode == "rb", "remote files are only read"
        return cast(BinaryIO, io.BufferedReader(RangeReader(self), MIN_RANGE_BYTES))

    def read_range(self, start: int, end: int) -> bytes:
        """Return the bytes from ``start`` to ``end``; raise as ``repeated`` does."""
        parts, at, limit = [], start, MAX_RANGE_BYTES
        while at < end:
            part = repeated(self.url, partial(self._request, at, _quarters(min(limit, end - at))))
            parts.append(part)
            at, limit = at + len(part), len(part)
        return b"".join(parts)

    def _request(self, start: int, sizes: Iterator[int]) -> bytes:
        """Request the next of ``sizes``: a connection that is cut after some bytes gets fewer."""
        size = next(sizes)
        system = file_system(self.url)
        if is_http(self.url):
            content = _http_range(system, self.url, start, size, self.stat().st_size)
        else:
            content = bytes(system.cat_file(self.url, start=start, end=start + size))
        if len(content) != size:
            self.check_version()
            text = f"{len(content)} instead of {size} bytes from byte {start} on"
            raise StorageError(f"{self.url}: {text}")
        return content

    def check_version(self) -> None:
        """Raise ``StorageError`` if the file is no longer the version of ``stat``."""
        now, then = request_facts(self.url), self.stat()
        if (now.st_size, now.version) != (then.st_size, then.version):
            raise StorageError(f"data: {self.url} changed while it was read", is_final=True)


def _http_range(system: Any, url: str, start: int, size: int, file_size: int) -> bytes:
    # Unlike cat_file, open does not read a whole file if the server ignores ranges.
    with system.open(url, size=file_size, cache_type="none") as file:
        file.seek(start)
        try:
            content: bytes = file.read(size)
        except ValueError:
            text = "the server ignores byte ranges; download the file, or use another server"
            raise StorageError(f"data.path: {url}: {text}", is_mistake=True) from None
    return content


class RangeReader(io.RawIOBase):
    """Reads a remote file with few requests: ranges grow while it is read on, as on a disk."""

    def __init__(self, file: RemoteFile) -> None:
        self._file, self._size = file, file.stat().st_size
        self._position, self._begin, self._block, self._range = 0, 0, memoryview(b""), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        count = max(0, min(len(target), self._size - self._position))
        offset = self._position - self._begin
        if not 0 <= offset <= offset + count <= len(self._block):
            self._read_block(count)
            offset = self._position - self._begin
        target[:count] = self._block[offset : offset + count]
        self._position += count
        return count

    def _read_block(self, count: int) -> None:
        """Read at least ``count`` bytes from the position on."""
        end = self._begin + len(self._block)
        reads_on = self._begin <= self._position <= end and self._range > 0
        self._range = min(2 * self._range, MAX_RANGE_BYTES) if reads_on else MIN_RANGE_BYTES
        # The end of a table file is its footer, and its last bytes are read first.
        last = max(0, self._size - MIN_RANGE_BYTES)
        self._begin = self._position if reads_on else min(self._position, last)
        begin, stop = self._begin, max(self._position + count, self._begin + self._range)
        self._block = memoryview(self._file.read_range(begin, min(stop, self._size)))
        self._file.check_version()


def request_facts(url: str) -> Facts:
    """Ask the server for the facts of a file; raise as ``repeated`` does."""
    return parse_info(url, repeated(url, lambda: file_system(url).info(url)))


def parse_info(url: str, info: Mapping[str, Any]) -> Facts:
    """Facts of ``info``, as a file system returns it. Raises ``FileNotFoundError`` for a folder."""
    if info.get("type") == "directory":
        raise FileNotFoundError(errno.ENOENT, "a folder, not a file", url)
    if not isinstance(info.get("size"), int):
        text = f"data.path: {url}: the server does not say its size"
        raise StorageError(text, is_mistake=True)
    times = [info[key] for key in TIME_KEYS if info.get(key)]
    written = _seconds(times[0]) if times else 0.0
    versions = [str(info[key]) for key in VERSION_KEYS if info.get(key)]
    version = versions[0] if versions else str(written or "")
    return Facts(info["size"], written, version, st_ino=url)


def _seconds(time_of: Any) -> float:
    """Seconds since the epoch of a number, a datetime, or the text of one (ISO 8601, HTTP)."""
    if isinstance(time_of, str):
        try:
            time_of = datetime.fromisoformat(time_of)
        except ValueError:
            time_of = parsedate_to_datetime(time_of)
    return float(time_of.timestamp() if isinstance(time_of, datetime) else time_of)


def _quarters(size: int) -> Iterator[int]:
    """Yield ``size``, a quarter of it, and so on, at least ``MIN_RANGE_BYTES``."""
    while True:
        yield size
        size = min(size, max(MIN_RANGE_BYTES, size // 4))


def is_http(url: str) -> bool:
    """True for the URL of a web server, which has no list of its files."""
    return url.lower().startswith(("http://", "https://"))


def file_system(url: str) -> Any:
    """Return the fsspec file system of a URL; ``ValueError`` names a missing package."""
    scheme, _, rest = url.partition("://")
    if scheme.lower() in ("file", "local"):
        raise ValueError(f"data.path: {url}: a local path has no {scheme}://")
    return _file_system(f"{scheme}://{rest.partition('/')[0]}", os.getpid())


@lru_cache(maxsize=64)
def _file_system(root: str, pid: int) -> Any:
    """One for all threads of a process, since a forked one cannot use its parent's connections."""
    # Imported here, because it takes a moment, and only URLs need it.
    from fsspec.core import url_to_fs

    scheme = root.partition("://")[0]
    try:
        system, _ = url_to_fs(f"{root}/", use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:
        raise ValueError(f"data.path: {scheme}://: {_missing_package(scheme, error)}") from None
    except ValueError as error:
        raise ValueError(f"data.path: {masked(root)}: {masked(str(error))}") from None
    if is_http(root):
        # A compressed response has no ranges.
        own = system.kwargs.get("headers", {})
        system.kwargs["headers"] = {"Accept-Encoding": "identity", **own}
    return system


def _missing_package(scheme: str, error: ImportError) -> str:
    cause = error.__cause__
    name = cause.name if isinstance(cause, ImportError) and cause.name else ""
    # Of a module that is there, but lacks a package of its own, fsspec's text says more.
    return f"needs a package: {install_text(name.partition('.')[0])}" if name else str(error)
