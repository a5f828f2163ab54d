"""Whatever is in the folder, and whenever a purge is killed: the newest that verify stay."""

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from checkpoint.store import STATE_FILE, delete, problems_of, published, purge, seal, step_of


class Killed(BaseException):
    pass


def write_checkpoint(folder: Path, step: int) -> Path:
    """The smallest there is."""
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    seal(path, {}, state={}, facts={"step": step})
    return path


def remove_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def flip_state(path: Path) -> None:
    (path / STATE_FILE).write_bytes(b"[]")


DAMAGES: list[Callable[[Path], None]] = [remove_manifest, flip_state]


@contextmanager
def killed_at(event: int) -> Iterator[None]:
    """Die before the ``event``-th rename or deletion of a folder."""
    left = event

    def dying(original: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise Killed
            return original(*args, **kwargs)

        return act

    with (
        patch.object(Path, "rename", dying(Path.rename)),
        patch.object(shutil, "rmtree", dying(shutil.rmtree)),
    ):
        yield


def verified(folder: Path) -> list[int]:
    return [step_of(path) for path in published(folder) if not problems_of(path)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    for step in range(1, 9):
        write_checkpoint(folder, step * 10)
    return folder


def arrange(source: Path, folder: Path, draws: random.Random) -> None:
    """A random part of the checkpoints, some of them damaged, and what is none."""
    folder.mkdir()
    for path in published(source):
        if draws.random() < 0.6:
            shutil.copytree(path, folder / path.name)
            if draws.random() < 0.4:
                draws.choice(DAMAGES)(folder / path.name)
    (folder / ".tmp-step-00000090-dead").mkdir()
    (folder / "step-999.bak").mkdir()


def check_purge(folder: Path, keep: int, keep_every: int, event: int) -> None:
    """Purge, be killed, purge again: the newest that verify are there after each."""
    before = verified(folder)
    for kill in (event, 0):
        try:
            with killed_at(kill):
                purge(folder, keep=keep, keep_every=keep_every, verified=set())
        except Killed:
            pass
        assert verified(folder)[:keep] == before[:keep]
    milestones = [step for step in before[keep:] if keep_every and step % keep_every == 0]
    assert verified(folder) == before[:keep] + milestones
    assert (folder / "step-999.bak").exists()


@pytest.mark.row(7, "Retention counts only what verifies, and never deletes the newest that does")
def test_the_newest_that_verify_are_kept(
    source: Path, tmp_path: Path, trials: Callable[[int], int], seen: Callable[[str], None]
) -> None:
    draws = random.Random(0)
    count = trials(2000)
    for trial in range(count):
        folder = tmp_path / str(trial)
        arrange(source, folder, draws)
        check_purge(folder, draws.choice([1, 2, 3]), draws.choice([0, 20, 30]), draws.randrange(8))
        shutil.rmtree(folder)
    seen(f"{count} folders, each with a kill: 0 violations")


def test_what_goes_is_no_checkpoint_from_the_first_moment(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 1)
    with patch.object(shutil, "rmtree"):
        delete([path])
    assert published(tmp_path) == []
    # What another thread has deleted is gone as well.
    delete([path])


def test_counting_what_does_not_verify_is_caught(source: Path, tmp_path: Path) -> None:
    """What the property is there to find."""
    folder = tmp_path / "run"
    shutil.copytree(source, folder)
    flip_state(folder / "step-00000080")
    with (
        patch("checkpoint.store.problems_of", lambda path: []),
        pytest.raises(AssertionError),
    ):
        check_purge(folder, 1, 0, 0)
