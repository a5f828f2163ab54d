"""Helpers shared by document readers: relative names, hashes per record, shard lookup, sampling."""

import errno
import hashlib
import os
import re
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from data.storage import DataPath
from runtime.printable import reason_of

# Number of evenly spaced documents whose contents a fingerprint hashes.
FINGERPRINT_SAMPLES = 64
# In each folder of prepared tokens.
TOKEN_INDEX_FILE = "index.json"
WILDCARD = re.compile(r"[*?[]")
# Of an ``OSError`` that says what a path is. Others, such as a stale handle of NFS or a server that
# does not answer, may not come after a restart.
PATH_ERRNOS = {
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL,
    errno.ENODEV, errno.ENXIO, errno.EACCES, errno.EPERM,
}  # fmt: skip


def path_error(path: object, error: OSError) -> ValueError | OSError:
    """Return the error that names ``path``: ``ValueError`` if the user must change something."""
    kind = ValueError if error.errno in PATH_ERRNOS else OSError
    return kind(f"data.path: {path}: {reason_of(error)}")


def relative_names(pattern: str, paths: Sequence[DataPath]) -> list[tuple[DataPath, str]]:
    """(path, name) of each path that a glob found; names are relative to the glob's fixed part.

    Raises ``ValueError`` for a name that is not UTF-8.
    """
    # Paths that begin with two slashes are others to pathlib, though not to Linux.
    root = re.sub(r"^//+", "/", os.path.dirname(WILDCARD.split(pattern)[0]))
    names = [path.relative_to(root).as_posix() for path in paths]
    for name in names:
        if name != name.encode(errors="ignore").decode():
            raise ValueError(f"data.path: the name {name!r} is not UTF-8")
    return list(zip(paths, names, strict=True))


def name_hash(name: str) -> int:
    """Hash a name to a uniform uint64, the same on every machine (BLAKE2b)."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def record_hashes(name: str, count: int) -> np.ndarray:
    """Hash each record of a file to a uniform uint64 (count,): splitmix64 seeded with the name."""
    with np.errstate(over="ignore"):
        z = np.uint64(name_hash(name)) + np.arange(count, dtype=np.uint64) * np.uint64(
            0x9E3779B97F4A7C15
        )
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def find_shard(ends: list[int], index: int) -> tuple[int, int]:
    """(shard, index within it) of document ``index``; ``ends``: cumulative document counts."""
    shard = bisect_right(ends, index)
    return shard, int(index) - (ends[shard - 1] if shard else 0)


def evenly_spaced(count: int, at_most: int) -> range:
    """At most ``at_most`` evenly spaced indices below ``count``."""
    return range(0, count, count // at_most + 1)


def order_fingerprints(order: str, *, repeat: bool) -> tuple[str, frozenset[str]]:
    """Return the ``fingerprint`` and ``resumable_fingerprints`` of a source with this ``order``."""
    repeating, once = (
        hashlib.sha256(text.encode()).hexdigest() for text in (order, f"{order}/once")
    )
    return repeating if repeat else once, frozenset([repeating, once])
