"""A damaged checkpoint is set aside and the one before it is loaded; nothing in a file is run."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from checkpoint.checkpointer import STATE_FILE
from checkpoint.manifest import NAME, describe_file
from checkpoint.reader import METADATA_FILE, Reader
from tests.checkpoint.small_run import Run
from tests.layouts import Layout
from tests.ranks import RankPool

TWO = Layout(2)
OLDER, NEWER = "step-00000001", "step-00000002"
FILES = ("__0_0.distcp", "__1_0.distcp", METADATA_FILE, STATE_FILE)
FOREIGN = ("step-999.bak", "old-step-500", ".tmp-step-00000003-dead", "step-3", "step-0000000a")
Found = tuple[int | None, dict[str, Any], dict[str, str]]


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def change_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Let ``change`` have the files that the manifest lists."""
    manifest = json.loads(path.read_text())
    change(manifest["files"])
    path.write_text(json.dumps(manifest))


def list_as(name: str, path: Path) -> None:
    """Also list state.json by another name, with the right size and hash."""
    change_manifest(path, lambda files: files.update({name: files[STATE_FILE]}))


def forge(change: Callable[[Metadata], object], path: Path) -> None:
    """Write another ``.metadata``, and a manifest that it agrees with."""
    metadata = Reader(path.parent).read_metadata()
    path.write_bytes(pickle.dumps(change(metadata) or metadata))
    entry = {METADATA_FILE: describe_file(path)}
    change_manifest(path.with_name(NAME), lambda files: files.update(entry))


class Evil:
    """Unpickling this ends the process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (1,)


def hold_evil(metadata: Metadata) -> None:
    metadata.planner_data = Evil()


def hold_bytes(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.norm.weight"] = BytesStorageMetadata()


def read_elsewhere(metadata: Metadata) -> None:
    for entry in metadata.storage_data.values():
        entry.relative_path = f"../{OLDER}/{entry.relative_path}"


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    **{
        f"{damage.__name__} {name}": (name, damage)
        for name in (*FILES, NAME)
        for damage in (flip_bit, truncate, empty, Path.unlink)
    },
    **{
        f"manifest {text}": (NAME, partial(Path.write_text, data=text))
        for text in ("{}", "[]", "null", '{"files": []}', '{"files": {}}')
    },
    **{
        f"unlisted {name}": (NAME, partial(change_manifest, change=lambda f, n=name: f.pop(n)))
        for name in FILES
    },
    **{
        f"listed {name}": (NAME, partial(list_as, name))
        for name in (f"../{OLDER}/{STATE_FILE}", f"/{STATE_FILE}", "..", ".", "", "a/b", "a\0")
    },
    "pickle": (METADATA_FILE, partial(forge, lambda _: Evil())),
    "pickle inside": (METADATA_FILE, partial(forge, hold_evil)),
    "bytes": (METADATA_FILE, partial(forge, hold_bytes)),
    "elsewhere": (METADATA_FILE, partial(forge, read_elsewhere)),
    "another object": (METADATA_FILE, partial(forge, lambda metadata: metadata.storage_meta)),
}


def save_two(folder: Path) -> list[Found]:
    """What a new run, the older and the newer checkpoint hold."""
    run = Run(folder, TWO)
    found: list[Found] = [(None, run.values.state, run.digests())]
    for step in (1, 2):
        run.save(step)
        found.append((step, run.values.state, run.digests()))
    return found


def load_all(folders: list[Path]) -> list[Found]:
    found = []
    for folder in folders:
        run = Run(folder, TWO)
        step = run.checkpointer.load_latest()
        found.append((step, run.values.state, run.digests()))
    return found


@pytest.fixture(scope="module")
def intact(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Found]]:
    folder = tmp_path_factory.mktemp("intact")
    return folder, ranks.run(save_two, 2, folder)[0]


def test_the_one_before_a_damaged_checkpoint_is_loaded(
    ranks: RankPool, intact: tuple[Path, list[Found]], tmp_path: Path
) -> None:
    source, (_, older, _) = intact
    folders = [tmp_path / str(index) for index in range(len(DAMAGES))]
    for folder, (name, damage) in zip(folders, DAMAGES.values(), strict=True):
        shutil.copytree(source, folder)
        damage(folder / NEWER / name)
    for results in ranks.run(load_all, 2, folders):
        for damaged, found in zip(DAMAGES, results, strict=True):
            assert found == older, damaged
    for folder in folders:
        [aside] = folder.glob(f"corrupt-{NEWER}-*")
        assert {path.name for path in folder.iterdir()} == {OLDER, aside.name}


def test_without_an_intact_checkpoint_nothing_is_loaded(
    ranks: RankPool, intact: tuple[Path, list[Found]], tmp_path: Path
) -> None:
    source, (untouched, _, _) = intact
    folders = [tmp_path / name for name in FILES]
    for folder in folders:
        shutil.copytree(source, folder)
        for step in (OLDER, NEWER):
            flip_bit(folder / step / folder.name)
    for results in ranks.run(load_all, 2, folders):
        assert results == [untouched] * len(folders)


def test_what_is_not_read_does_not_matter(
    ranks: RankPool, intact: tuple[Path, list[Found]], tmp_path: Path
) -> None:
    source, (_, _, newer) = intact
    folder = tmp_path / "checkpoints"
    shutil.copytree(source, folder)
    (folder / NEWER / "notes.txt").write_text("the good one")
    for name in FOREIGN:
        shutil.copytree(source / OLDER, folder / name)
    assert ranks.run(load_all, 2, [folder]) == [[newer], [newer]]
    assert {path.name for path in folder.iterdir()} == {OLDER, NEWER, *FOREIGN}
