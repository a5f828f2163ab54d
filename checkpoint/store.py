"""The folder of a run's checkpoints: which there are, which verify, which go. No ranks, no tensors.

Nothing is ever overwritten: what no longer is a checkpoint is renamed, and its name says why.
"""

import json
import re
import shutil
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from checkpoint.manifest import faults, read_manifest, write_manifest
from checkpoint.storage import INDEX_FILE, Entry, HashedFile, read_file, read_index, write_index
from runtime.log import logger

STATE_FILE = "state.json"


def published(folder: Path) -> list[Path]:
    """The checkpoints that a run published, newest first; ``folder`` has them all."""
    found = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def problems_of(folder: Path, first: int = 0, stride: int = 1) -> list[str]:
    """What is wrong with a checkpoint; with ``first`` and ``stride``, with a share of its files."""
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return [str(error)]
    files = {INDEX_FILE: None, STATE_FILE: None} | manifest["files"]
    share = sorted(files)[first::stride]
    problems = faults(folder, files, share)
    if INDEX_FILE in share and not problems:
        try:
            read_index(folder, sizes_of(manifest))
            read_state(folder)
        except ValueError as error:
            problems = [str(error)]
    return problems


def read_state(folder: Path) -> dict[str, Any]:
    """A checkpoint's state other than tensors; ``ValueError`` if it cannot be read."""
    path = folder / STATE_FILE
    try:
        state = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(state, dict):
        raise ValueError(f"{path}: not a state")
    return state


def seal(
    folder: Path,
    parts: Mapping[str, tuple[dict[str, Any], dict[str, Entry]]],
    *,
    state: dict[str, Any],
    facts: dict[str, Any],
) -> None:
    """Make a folder of tensors a checkpoint; ``parts``: by file, what ``write_parts`` returned.

    Raises ``ValueError`` or ``OSError`` for what could not be loaded: short writes, missing parts.
    """
    files = {name: description for name, (description, _) in parts.items()}
    state_file = HashedFile(folder / STATE_FILE)
    state_file.write(json.dumps(state).encode())
    files[STATE_FILE] = state_file.close()
    files[INDEX_FILE] = write_index(folder / INDEX_FILE, [entries for _, entries in parts.values()])
    sizes = sizes_of({"files": files})
    read_index(folder, sizes)
    if any((folder / name).stat().st_size != size for name, size in sizes.items()):
        raise OSError("a file is shorter than what was written to it")
    write_manifest(folder, files, facts)


def set_aside(folder: Path, why: str) -> Path:
    """Rename a checkpoint so that it no longer counts as one; nothing of it is lost."""
    return folder.rename(folder.with_name(f"{why}-{folder.name}-{uuid.uuid4().hex[:8]}"))


def purge(folder: Path, *, keep: int, keep_every: int, verified: set[str]) -> None:
    """Delete checkpoints older than the newest ``keep`` that verify, but for milestones.

    ``verified`` has the names of those that need no second look; new ones that verify are added.
    """
    kept = 0
    for path in published(folder):
        if kept < keep:
            problems = [] if path.name in verified else problems_of(path)
            if problems:
                aside = set_aside(path, "corrupt")
                logger.warning("checkpoint set aside as %s: %s", aside, "; ".join(problems))
            else:
                verified.add(path.name)
                kept += 1
        elif not keep_every or step_of(path) % keep_every:
            delete([path])


def delete(folders: Iterable[Path]) -> None:
    for folder in folders:
        # Renamed first, so that a half-deleted folder is never a candidate.
        trash = folder.with_name(f".trash-{uuid.uuid4().hex}")
        # Another thread may have just deleted it.
        with suppress(FileNotFoundError):
            folder.rename(trash)
        # What stays behind, such as files that are open on NFS, the next save deletes.
        shutil.rmtree(trash, ignore_errors=True)


def sizes_of(manifest: dict[str, Any]) -> dict[str, int]:
    """The size in bytes of each file that the manifest lists."""
    return {name: description["size"] for name, description in manifest["files"].items()}
