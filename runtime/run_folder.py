"""The folders of a run."""

from pathlib import Path


def make_folder(run_folder: Path, name: str) -> None:
    """Make a folder of a run, and the run's, where they are not there yet: what a run writes is its
    owner's alone."""
    for folder in (run_folder, run_folder / name):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
