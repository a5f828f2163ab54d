"""Retention keeps the newest checkpoints that verify, also if a purge is killed."""

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from checkpoint.checkpoint_dir import STATE_FILE, delete, purge, verify_checkpoint, write_metadata
from checkpoint.tensor_index import index_content, write_index
from runtime.run_folder import list_checkpoints, step_of


class Killed(BaseException):
    pass


def write_checkpoint(folder: Path, step: int) -> Path:
    """Write a checkpoint without tensors."""
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    files = write_index(path, index_content([]))
    write_metadata(path, files, state={}, metadata={"step": step})
    return path


def remove_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def flip_state(path: Path) -> None:
    (path / STATE_FILE).write_bytes(b"[]")


DAMAGES: list[Callable[[Path], None]] = [remove_manifest, flip_state]


@contextmanager
def killed_at(event: int) -> Iterator[None]:
    """Raise ``Killed`` before the ``event``-th rename or deletion of a folder."""
    remaining = event

    def dying(original: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any, **kwargs: Any) -> Any:
            nonlocal remaining
            remaining -= 1
            if remaining == 0:
                raise Killed
            return original(*args, **kwargs)

        return act

    with (
        patch.object(Path, "rename", dying(Path.rename)),
        patch.object(shutil, "rmtree", dying(shutil.rmtree)),
    ):
        yield


def verified_steps(folder: Path) -> list[int]:
    return [step_of(path) for path in list_checkpoints(folder) if not verify_checkpoint(path)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    for step in range(1, 9):
        write_checkpoint(folder, step * 10)
    return folder


def copy_some(source: Path, folder: Path, rng: random.Random) -> None:
    """Copy random checkpoints, damage some of them, and add foreign folders."""
    folder.mkdir()
    for path in list_checkpoints(source):
        if rng.random() < 0.6:
            shutil.copytree(path, folder / path.name)
            if rng.random() < 0.4:
                rng.choice(DAMAGES)(folder / path.name)
    (folder / ".tmp-step-00000090-dead").mkdir()
    (folder / "step-999.bak").mkdir()


def check_purge(folder: Path, keep: int, keep_every: int, event: int) -> None:
    """Purge with a kill, then again; the newest that verify must survive both."""
    before = verified_steps(folder)
    for kill in (event, 0):
        try:
            with killed_at(kill):
                purge(folder, keep=keep, keep_every=keep_every, verified=set())
        except Killed:
            pass
        assert verified_steps(folder)[:keep] == before[:keep]
    milestones = [step for step in before[keep:] if keep_every and step % keep_every == 0]
    assert verified_steps(folder) == before[:keep] + milestones
    assert (folder / "step-999.bak").exists()


@pytest.mark.row(7, "Retention counts only what verifies, and never deletes the newest that does")
def test_purge_keeps_newest_that_verify(
    source: Path, tmp_path: Path, trials: Callable[[int], int], record_result: Callable[[str], None]
) -> None:
    rng = random.Random(0)
    count = trials(2000)
    for trial in range(count):
        folder = tmp_path / str(trial)
        copy_some(source, folder, rng)
        check_purge(folder, rng.choice([1, 2, 3]), rng.choice([0, 20, 30]), rng.randrange(8))
        shutil.rmtree(folder)
    record_result(f"{count} folders, each with a kill: 0 violations")


def test_delete_hides_checkpoint_before_removing_files(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 1)
    with patch.object(shutil, "rmtree"):
        delete([path])
    assert list_checkpoints(tmp_path) == []
    # Deleted by another thread before.
    delete([path])


def test_check_purge_detects_counting_damaged_checkpoints(source: Path, tmp_path: Path) -> None:
    """Verify that the property test catches the fault that it is for."""
    folder = tmp_path / "run"
    shutil.copytree(source, folder)
    flip_state(folder / "step-00000080")
    with (
        patch("checkpoint.checkpoint_dir.verify_checkpoint", lambda path, **_: []),
        pytest.raises(AssertionError),
    ):
        check_purge(folder, 1, 0, 0)


def test_verification_can_be_stopped(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 1)

    def stop() -> None:
        raise Killed

    with pytest.raises(Killed):
        verify_checkpoint(path, raise_if_stopped=stop)
    assert verify_checkpoint(path) == []
