"""Order of fsyncs and renames: what survives a power cut. Writes that fail."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch


@contextmanager
def recorded_durability() -> Iterator[list[tuple[str, Path]]]:
    """Yield a list of ("fsync", path) and ("rename", old path), in the order of the calls."""
    calls: list[tuple[str, Path]] = []
    fsync, rename = os.fsync, os.rename

    def recorded_fsync(descriptor: int) -> None:
        calls.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def recorded_rename(old: Any, new: Any) -> None:
        calls.append(("rename", Path(old)))
        rename(old, new)

    with patch("os.fsync", recorded_fsync), patch("os.rename", recorded_rename):
        yield calls


def assert_durable(calls: list[tuple[str, Path]], folder: Path) -> None:
    """Check that a folder which was renamed to ``folder`` survives a power cut, with its files."""
    index = max(index for index, (call, _) in enumerate(calls) if call == "rename")
    scratch, before, after = calls[index][1], calls[:index], calls[index + 1 :]
    for path in (scratch, *(scratch / file.name for file in folder.iterdir())):
        assert ("fsync", path) in before, f"{path.name} is not fsynced before its rename"
    assert ("fsync", folder.parent) in after, "the rename is not fsynced"


@contextmanager
def file_size_limit(n_bytes: int) -> Iterator[None]:
    """Limit the size of any file (RLIMIT_FSIZE): writes beyond it raise EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
