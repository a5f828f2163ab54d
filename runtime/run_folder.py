"""The folders of a run."""

from pathlib import Path


def make_folder(run_folder: Path, name: str) -> None:
    """Make a folder of a run, and the run's, where they are not there yet: readable by their owner
    alone."""
    for folder in (run_folder.parent, run_folder, run_folder / name):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
