"""Private run folders, atomic writes and fsync."""

import os
from pathlib import Path


def make_folder(folder: Path) -> None:
    """Create ``folder`` (a run's ``control/`` or ``logs/``) and its parent, with mode 0700."""
    for path in (folder.parent, folder):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)


def atomic_write_text(path: Path, text: str) -> None:
    """Replace a file atomically: even after a power cut, it has the old or the new text."""
    scratch = path.with_name(f".{path.name}")
    with scratch.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


def fsync_folder(folder: Path) -> None:
    """Fsync a directory, so that renames in it survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
