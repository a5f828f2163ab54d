"""Checkpoint directory of a run: verify, write metadata, quarantine and purge, without ranks.

Nothing is overwritten: a folder that no longer counts as a checkpoint is renamed with the reason.
"""

import json
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from checkpoint.hashed_file import read_checked, write_hashed
from checkpoint.manifest import read_manifest, sizes_of, verify_files, write_manifest
from checkpoint.tensor_index import TENSOR_INDEX_FILE, read_index
from runtime.filesystem import read_file
from runtime.log import logger
from runtime.run_folder import list_checkpoints, step_of

STATE_FILE = "state.json"


def verify_checkpoint(
    folder: Path,
    first: int = 0,
    stride: int = 1,
    raise_if_stopped: Callable[[], None] = lambda: None,
) -> list[str]:
    """Hash a checkpoint's files and check its index and state; return the problems found.

    ``first`` and ``stride`` select every ``stride``-th file, so that ranks share the work.
    ``raise_if_stopped``: as in ``describe_file``. Raises ``OSError`` as ``read_checked`` does.
    """
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return [str(error)]
    # Required: if the manifest does not list them, None matches no file.
    files = {TENSOR_INDEX_FILE: None, STATE_FILE: None} | manifest["files"]
    names = sorted(files)[first::stride]
    problems = verify_files(folder, files, names, raise_if_stopped)
    if TENSOR_INDEX_FILE in names and not problems:
        try:
            read_index(folder, sizes_of(manifest))
            read_state(folder)
        except ValueError as error:
            problems = [str(error)]
    return problems


def read_state(folder: Path) -> dict[str, Any]:
    """Read a checkpoint's JSON state; raise ``ValueError`` if it is damaged.

    Raises ``OSError`` as ``read_checked`` does.
    """
    path = folder / STATE_FILE
    try:
        state = json.loads(read_checked(lambda: read_file(path)))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(state, dict):
        raise ValueError(f"{path}: not a JSON object")
    return state


def write_metadata(
    folder: Path,
    written: Mapping[str, dict[str, Any]],
    *,
    state: dict[str, Any],
    metadata: dict[str, Any],
) -> None:
    """Write state and manifest; ``written``: size and hash of the tensor files and their index.

    Raises ``OSError`` if a file is shorter than what was written to it.
    """
    state_file = write_hashed(folder / STATE_FILE, json.dumps(state).encode())
    files = {**written, STATE_FILE: state_file}
    for name, size in sizes_of({"files": files}).items():
        if (folder / name).stat().st_size != size:
            raise OSError(f"short write: {name} is smaller than what was written to it")
    write_manifest(folder, files, metadata)


def quarantine(folder: Path, reason: str) -> Path:
    """Rename a checkpoint to ``{reason}-...``, so that it no longer counts; return its new path."""
    return folder.rename(folder.with_name(f"{reason}-{folder.name}-{uuid.uuid4().hex[:8]}"))


def purge(
    folder: Path,
    *,
    keep: int,
    keep_every: int,
    verified: set[str],
    raise_if_stopped: Callable[[], None] = lambda: None,
) -> None:
    """Delete all but the newest ``keep`` that verify, and multiples of ``keep_every`` steps.

    Quarantines damaged ones. ``verified`` names checkpoints that need no second check. Mutates
    ``verified``: adds those that verify. ``raise_if_stopped``: as in ``describe_file``.
    """
    kept = 0
    for path in list_checkpoints(folder):
        if kept < keep:
            problems = []
            if path.name not in verified:
                problems = verify_checkpoint(path, raise_if_stopped=raise_if_stopped)
            if problems:
                renamed = quarantine(path, "corrupt")
                logger.warning("checkpoint: quarantined as %s: %s", renamed, "; ".join(problems))
            else:
                verified.add(path.name)
                kept += 1
        elif not keep_every or step_of(path) % keep_every:
            delete([path])


def delete(folders: Iterable[Path]) -> None:
    """Delete folders; one that is missing, or partly in use, is no error.

    Of a symbolic link only the link is deleted.
    """
    for folder in folders:
        # Renamed first, so that a half-deleted folder never counts as a checkpoint.
        trash = folder.with_name(f".trash-{uuid.uuid4().hex}")
        # Another thread may have deleted it.
        with suppress(FileNotFoundError):
            folder.rename(trash)
        if trash.is_symlink():
            trash.unlink()
            continue
        # The next save deletes what remains, such as files that are open on NFS.
        shutil.rmtree(trash, ignore_errors=True)
