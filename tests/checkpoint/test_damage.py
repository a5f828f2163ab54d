"""A damaged checkpoint is quarantined and the one before it loads; no file can run code."""

import errno
import json
import os
import pickle
import random
import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint.planner_helpers import _create_write_items

from checkpoint.checkpoint_dir import STATE_FILE, verify_checkpoint
from checkpoint.hashed_file import describe_file
from checkpoint.manifest import MANIFEST_FILE, read_manifest, sizes_of, write_manifest
from checkpoint.tensor_files import lay_out, load_single_process, write_tensor_file
from checkpoint.tensor_index import TENSOR_INDEX_FILE, read_index
from config import ConfigError
from runtime.object_collectives import RankFailure
from tests.lib.layouts import Layout
from tests.lib.ranks import RankPool
from tests.lib.small_run import Run

T = TypeVar("T")
TWO = Layout(2)
OLDER, NEWER = "step-00000001", "step-00000002"
FILES = ("rank-00000.bin", "rank-00001.bin", TENSOR_INDEX_FILE, STATE_FILE)
FOREIGN = ("step-999.bak", "old-step-500", ".tmp-step-00000003-dead", "step-3", "step-0000000a")


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def forge(change: Callable[[Path], object], path: Path) -> None:
    """Change a file with ``change``, and update its size and hash in the manifest."""
    change(path)
    manifest = read_manifest(path.parent)
    manifest["files"][path.name] = describe_file(path)
    rewrite_manifest(path.parent, manifest)


def rewrite_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    (folder / MANIFEST_FILE).unlink()
    write_manifest(folder, manifest.pop("files"), manifest)


def list_as(name: Any, path: Path) -> None:
    """Also list state.json by another name, with the right size and hash."""
    manifest = read_manifest(path.parent)
    manifest["files"][name] = manifest["files"][STATE_FILE]
    rewrite_manifest(path.parent, manifest)


def describe_as(description: Any, path: Path) -> None:
    """Replace the manifest's description of state.json."""
    manifest = read_manifest(path.parent)
    manifest["files"][STATE_FILE] = description
    rewrite_manifest(path.parent, manifest)


def unlist(name: str, path: Path) -> None:
    manifest = read_manifest(path.parent)
    del manifest["files"][name]
    rewrite_manifest(path.parent, manifest)


def change_record(change: dict[str, Any], path: Path) -> None:
    """Change the index record of the first tensor."""
    index = json.loads(path.read_text())
    next(iter(index.values())).update(change)
    path.write_text(json.dumps(index))


def change_shard(change: dict[str, Any], path: Path) -> None:
    """Change the first shard of the first tensor in the index."""
    index = json.loads(path.read_text())
    next(iter(index.values()))["parts"][0].update(change)
    path.write_text(json.dumps(index))


class Evil:
    """Object whose unpickling ends the process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (1,)


def become_link(path: Path) -> None:
    """Replace a file by a symlink to the same bytes."""
    elsewhere = path.parent.parent / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    path.rename(elsewhere / path.name)
    path.symlink_to(elsewhere / path.name)


def become_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def become_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


RECORDS: dict[str, dict[str, Any]] = {
    "foreign dtype": {"dtype": "system"},
    "dtype that is none": {"dtype": ["float32"]},
    "negative shape": {"shape": [-1]},
    "fractional shape": {"shape": [0.5]},
    "shape in words": {"shape": ["many"]},
    "no shape": {"shape": None},
    "giant shape": {"shape": [10**30]},
    "no parts": {"parts": []},
    "parts that are none": {"parts": "all"},
}
SHARDS: dict[str, dict[str, Any]] = {
    "part above": {"file": f"../{OLDER}/rank-00000.bin"},
    "part at the root": {"file": "/etc/passwd"},
    "part of no file": {"file": None},
    "unlisted file": {"file": "rank-00009.bin"},
    "negative start": {"start": -64},
    "start beyond the end": {"start": 2**40},
    "start between elements": {"start": 1},
    "giant part": {"sizes": [2**40]},
    "negative part": {"sizes": [-1]},
    "part outside": {"offsets": [2**40]},
    "part of other dims": {"sizes": [1, 1, 1, 1]},
    "code in a part": {"__reduce__": "os.system"},
}
TEXTS = {
    "pickle": pickle.dumps(Evil()),
    "list": b"[]",
    "null": b"null",
    "abyss": b"[" * 100_000,
    "giant number": b'{"a": ' + b"9" * 10_000 + b"}",
    "not utf-8": b"\xff\xfe{}",
}
DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    f"{damage.__name__} {name}": (name, damage)
    for name in (*FILES, MANIFEST_FILE)
    for damage in (flip_bit, truncate, empty, Path.unlink)
}
ATTACKS: dict[str, tuple[str, Callable[[Path], object]]] = {
    **{
        f"{attack.__name__} {name}": (name, attack)
        for name in (*FILES, MANIFEST_FILE)
        for attack in (become_link, become_pipe, become_folder)
    },
    **{f"unlisted {name}": (MANIFEST_FILE, partial(unlist, name)) for name in FILES},
    **{
        f"listed {name!r}": (MANIFEST_FILE, partial(list_as, name))
        for name in (f"../{OLDER}/{STATE_FILE}", f"/{STATE_FILE}", "..", ".", "", "a/b", "a\0")
    },
    **{
        f"described as {description}": (MANIFEST_FILE, partial(describe_as, description))
        for description in ({"size": 1}, {"xxh3_128": ""}, {"size": "", "xxh3_128": ""}, None)
    },
    **{
        f"{name} {text}": (name, partial(forge, partial(Path.write_bytes, data=data)))
        for name in (TENSOR_INDEX_FILE, STATE_FILE)
        for text, data in TEXTS.items()
    },
    **{
        f"manifest {text}": (MANIFEST_FILE, partial(Path.write_bytes, data=d))
        for text, d in TEXTS.items()
    },
    **{
        text: (TENSOR_INDEX_FILE, partial(forge, partial(change_record, change)))
        for text, change in RECORDS.items()
    },
    **{
        text: (TENSOR_INDEX_FILE, partial(forge, partial(change_shard, change)))
        for text, change in SHARDS.items()
    },
}
Loaded = tuple[int | None, dict[str, Any], dict[str, str]]


def save_two(folder: Path) -> list[Loaded]:
    """Save twice; return the state of the new run and of both checkpoints."""
    run = Run(folder, TWO)
    found: list[Loaded] = [(None, run.values.state, run.digests())]
    for step in (1, 2):
        run.save(step)
        found.append((step, run.values.state, run.digests()))
    return found


def load_all(folders: list[Path]) -> list[Loaded]:
    """Step, values and digests of a run that loads from each folder."""
    run, found = Run(folders[0], TWO), []
    for folder in folders:
        run.spoil()
        step = run.checkpointer_in(folder).load_latest()
        found.append((step, run.values.state, run.digests()))
    return found


def errors_of_loading(folders: list[Path], *, is_initial: bool) -> list[str]:
    """Errors of loading from each folder; the weights must not change."""
    run, found = Run(folders[0], TWO), []
    before = run.digests()
    for folder in folders:
        checkpointer = run.checkpointer_in(folder, initial_load_path=str(folder / NEWER))
        from_path = partial(checkpointer.load_initial, run.model_state)
        load = from_path if is_initial else checkpointer.load_latest
        with pytest.raises(ConfigError) as raised:
            load()
        found.append(str(raised.value))
    assert run.digests() == before
    return found


def record_opened(paths: set[str], function: Callable[..., T], *args: Any) -> T:
    """Call ``function`` and add all paths that it opens to ``paths``."""
    is_active = True

    def hook(event: str, details: tuple[Any, ...]) -> None:
        if is_active and event == "open" and isinstance(details[0], str):
            paths.add(details[0])

    sys.addaudithook(hook)
    try:
        return function(*args)
    finally:
        is_active = False


def load_and_record_opened(folders: list[Path]) -> tuple[list[Loaded], set[str]]:
    paths: set[str] = set()
    return record_opened(paths, load_all, folders), paths


@pytest.fixture(scope="module")
def intact(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Loaded]]:
    folder = tmp_path_factory.mktemp("intact")
    return folder, ranks.run(save_two, 2, folder)[0]


def damaged_copies(
    source: Path, target: Path, damages: dict[str, tuple[str, Callable[[Path], object]]]
) -> list[Path]:
    """Copy the run for each damage, and damage the newer checkpoint."""
    folders = [target / str(index) / "checkpoints" for index in range(len(damages))]
    for folder, (name, damage) in zip(folders, damages.values(), strict=True):
        shutil.copytree(source, folder)
        damage(folder / NEWER / name)
    return folders


@pytest.mark.row(6, "A damaged checkpoint is quarantined and the one before it is used")
def test_damaged_checkpoint_falls_back_to_the_one_before(
    ranks: RankPool,
    intact: tuple[Path, list[Loaded]],
    tmp_path: Path,
    record_result: Callable[[str], None],
) -> None:
    source, (_, older, _) = intact
    folders = damaged_copies(source, tmp_path, DAMAGES)
    for results in ranks.run(load_all, 2, folders):
        for damaged, found in zip(DAMAGES, results, strict=True):
            assert found == older, damaged
    for folder in folders:
        [quarantined] = folder.glob(f"corrupt-{NEWER}-*")
        assert {path.name for path in folder.iterdir()} == {OLDER, quarantined.name}
    record_result(f"{len(DAMAGES)} of {len(DAMAGES)} damages")


def load_with_errors(folder: Path, name: str, number: int, n_errors: int) -> list[Any]:
    """Load twice; rank 1 cannot open the newer file ``name`` in ``n_errors`` attempts."""
    run, found = Run(folder, TWO), list[Any]()
    opened, left = os.open, n_errors if torch.distributed.get_rank() == 1 else 0

    def failing(path: Any, *args: Any) -> int:
        nonlocal left
        if str(path).endswith(f"{NEWER}/{name}") and left:
            left -= 1
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, *args)

    with patch("os.open", failing):
        for _ in range(2):
            try:
                found.append(run.checkpointer_in(folder).load_latest())
            except RankFailure as error:
                found.append(str(error))
    return found


def load_from_unlistable(folder: Path, number: int) -> list[str]:
    """Errors of loading where rank 0 cannot list ``folder``, with checkpoints and without."""
    run, listed = Run(folder, TWO), os.listdir

    def failing(path: Any = ".") -> list[str]:
        if Path(path) == folder:
            raise OSError(number, os.strerror(number), str(path))
        return listed(path)

    found = []
    with patch("os.listdir", failing):
        for enable in (True, False):
            with pytest.raises(RankFailure) as caught:
                run.checkpointer_in(folder, enable=enable).load_latest()
            found.append(str(caught.value))
    return found


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE, errno.EIO])
def test_folder_that_cannot_be_listed_is_not_empty(
    ranks: RankPool, intact: tuple[Path, list[Loaded]], number: int
) -> None:
    for errors in ranks.run(load_from_unlistable, 2, intact[0], number):
        assert all(os.strerror(number) in text for text in errors)


PASSING = (errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.EACCES)


@pytest.mark.parametrize("name", [MANIFEST_FILE, FILES[1]])
@pytest.mark.parametrize("number", PASSING, ids=lambda number: errno.errorcode[number])
def test_error_that_may_pass_is_no_damage(
    ranks: RankPool, intact: tuple[Path, list[Loaded]], tmp_path: Path, name: str, number: int
) -> None:
    folder = shutil.copytree(intact[0], tmp_path / "copy")
    for failure, step in ranks.run(load_with_errors, 2, folder, name, number, 1):
        assert re.search(rf"^rank 1: .*{os.strerror(number)}", failure)
        assert step == 2
    assert {path.name for path in folder.iterdir()} == {OLDER, NEWER}


@pytest.mark.parametrize(
    ("number", "n_errors", "steps"),
    [
        (errno.EIO, 1, [2, 2]),
        (errno.EIO, 2, [1, 1]),
        # Of ext4 and XFS, for a damaged inode.
        (errno.EUCLEAN, 1, [1, 1]),
        (errno.EBADMSG, 1, [1, 1]),
    ],
)
def test_error_of_damage_is_damage_and_an_io_error_if_repeated(
    ranks: RankPool,
    intact: tuple[Path, list[Loaded]],
    tmp_path: Path,
    number: int,
    n_errors: int,
    steps: Any,
) -> None:
    folder = shutil.copytree(intact[0], tmp_path / "copy")
    found = ranks.run(load_with_errors, 2, folder, FILES[1], number, n_errors)
    assert found == [steps, steps]


@pytest.mark.row(24, "A hostile checkpoint runs no code and reads nothing outside of itself")
def test_hostile_checkpoint_runs_no_code_and_reads_nothing_else(
    ranks: RankPool,
    intact: tuple[Path, list[Loaded]],
    tmp_path: Path,
    record_result: Callable[[str], None],
) -> None:
    source, (_, older, _) = intact
    folders = damaged_copies(source, tmp_path, ATTACKS)
    for texts in ranks.run(partial(errors_of_loading, is_initial=True), 2, folders):
        assert all(text.startswith("checkpoint.initial_load_path: ") for text in texts)
    for results, opened in ranks.run(load_and_record_opened, 2, folders):
        for attack, found in zip(ATTACKS, results, strict=True):
            assert found == older, attack
        # Only files in a checkpoint are opened; O_NOFOLLOW rejects links.
        inside = {path for path in opened if path.startswith(str(tmp_path))}
        assert inside
        assert not [path for path in inside if "elsewhere" in path or ".." in path]
        assert not [path for path in opened - inside if path.startswith(("/etc", str(source)))]
    record_result(
        f"{len(ATTACKS)} attacks through resume and initial_load_path: 0 executed, 0 outside"
    )


def test_shard_beyond_the_end_of_its_file_is_rejected(intact: tuple[Path, list[Loaded]]) -> None:
    checkpoint = intact[0] / NEWER
    sizes = sizes_of(read_manifest(checkpoint))
    for name in sizes.keys() - {STATE_FILE, TENSOR_INDEX_FILE}:
        with pytest.raises(ValueError, match=f"lies outside {name}"):
            read_index(checkpoint, sizes | {name: sizes[name] - 1})
    assert read_index(checkpoint, sizes)


def test_nothing_is_loaded_or_renamed_if_none_verifies(
    ranks: RankPool, intact: tuple[Path, list[Loaded]], tmp_path: Path
) -> None:
    source, _ = intact
    folders = [tmp_path / name for name in FILES]
    for folder in folders:
        shutil.copytree(source, folder)
        for step in (OLDER, NEWER):
            flip_bit(folder / step / folder.name)
    for texts in ranks.run(partial(errors_of_loading, is_initial=False), 2, folders):
        assert all("no checkpoint verifies" in text for text in texts)
        assert all(OLDER in text and NEWER in text for text in texts)
    for folder in folders:
        assert {path.name for path in folder.iterdir()} == {OLDER, NEWER}


@pytest.mark.row(5, "Bit rot is noticed")
def test_flipped_bits_and_zeroed_pages_are_detected(
    intact: tuple[Path, list[Loaded]],
    tmp_path: Path,
    trials: Callable[[int], int],
    record_result: Callable[[str], None],
) -> None:
    folder = tmp_path / NEWER
    shutil.copytree(intact[0] / NEWER, folder)
    want, rng = read_manifest(folder), random.Random(0)
    n_flips, n_pages, missed = trials(1000), trials(200), []
    for trial in range(n_flips + n_pages):
        path = rng.choice(sorted(folder.iterdir()))
        content = path.read_bytes()
        damaged = bytearray(content)
        offset = rng.randrange(len(content))
        if trial < n_flips:
            damaged[offset] ^= 1 << rng.randrange(8)
        else:
            damaged[offset : offset + 4096] = bytes(len(damaged[offset : offset + 4096]))
        path.write_bytes(damaged)
        is_unseen = damaged != content and not verify_checkpoint(folder)
        # A change of white space in the manifest does not matter.
        if is_unseen and (path.name != MANIFEST_FILE or read_manifest(folder) != want):
            missed.append((path.name, offset))
        path.write_bytes(content)
    assert not missed
    assert not verify_checkpoint(folder)
    record_result(f"{n_flips} flipped bits and {n_pages} zeroed pages: 0 missed")


def test_unlisted_files_and_foreign_folders_are_ignored(
    ranks: RankPool, intact: tuple[Path, list[Loaded]], tmp_path: Path
) -> None:
    source, (_, _, newer) = intact
    folder = tmp_path / "checkpoints"
    shutil.copytree(source, folder)
    (folder / NEWER / "notes.txt").write_text("the good one")
    (folder / NEWER / ".metadata").write_bytes(pickle.dumps(Evil()))
    for name in FOREIGN:
        shutil.copytree(source / OLDER, folder / name)
    assert ranks.run(load_all, 2, [folder]) == [[newer], [newer]]
    assert {path.name for path in folder.iterdir()} == {OLDER, NEWER, *FOREIGN}


def test_file_truncated_after_verification_raises(tmp_path: Path) -> None:
    tensor = torch.ones(5)
    items = _create_write_items("x", tensor)
    write_tensor_file(tmp_path / "file", items, lambda _: tensor)
    records = lay_out("file", items).records
    read = {"x": torch.zeros(5)}
    load_single_process(read, tmp_path, records)
    assert torch.equal(read["x"], tensor)
    os.truncate(tmp_path / "file", tensor.nbytes - 1)
    # DCP's CheckpointException is no Exception.
    with pytest.raises(BaseException, match="truncated since it was verified"):
        load_single_process(read, tmp_path, records)
