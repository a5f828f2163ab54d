"""The folders of a run."""

import os
from pathlib import Path


def make_folder(folder: Path) -> None:
    """Make a run's ``control/`` or ``logs/``, and the run's folder, where they are not there yet:
    what a run writes is its owner's alone."""
    for path in (folder.parent, folder):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once: readers see the old text or the new, after a power cut too."""
    scratch = path.with_name(f".{path.name}")
    with scratch.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)
