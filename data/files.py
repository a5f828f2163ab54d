"""What all files of documents have in common: names, keys, places, and samples of documents."""

import hashlib
import os
import re
from bisect import bisect_right
from pathlib import Path

import numpy as np

# How many documents, spread over all, stand for the contents in a fingerprint.
FINGERPRINTED = 64


def named(pattern: str, paths: list[Path]) -> list[tuple[Path, str]]:
    """(path, name) of each path that a glob found; names do not depend on where the tree lies."""
    root = os.path.dirname(re.split(r"[*?[]", pattern)[0])
    return [(path, path.relative_to(root).as_posix()) for path in paths]


def name_key(name: str) -> int:
    """A uniform uint64 from a name, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def record_keys(name: str, count: int) -> np.ndarray:
    """A uniform uint64 per record of a file: splitmix64, started at the file's key."""
    with np.errstate(over="ignore"):
        z = np.uint64(name_key(name)) + np.arange(count, dtype=np.uint64) * np.uint64(
            0x9E3779B97F4A7C15
        )
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def locate(ends: list[int], index: int) -> tuple[int, int]:
    """The file of document ``index``, and its place there. ``ends``: documents up to each's end."""
    file = bisect_right(ends, index)
    return file, int(index) - (ends[file - 1] if file else 0)


def spread(count: int, at_most: int) -> range:
    """Up to ``at_most`` of ``count`` indices, evenly spread over them."""
    return range(0, count, count // at_most + 1)
