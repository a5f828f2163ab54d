"""The folders of a run."""

from pathlib import Path


def make_folder(folder: Path) -> None:
    """Make a run's ``control/`` or ``logs/``, and the run's folder, where they are not there yet:
    what a run writes is its owner's alone."""
    for path in (folder.parent, folder):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
