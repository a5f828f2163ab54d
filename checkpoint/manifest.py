"""Checkpoint manifest: metadata of the run, and size and hash of every file."""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from checkpoint.hashed_file import describe_file, read_checked, write_hashed
from runtime.filesystem import open_file, read_file

MANIFEST_FILE = "manifest.json"
# No path separators: a name cannot lead out of the checkpoint directory.
FILE_NAME = re.compile(r"\w[\w.-]*")
# Types of metadata, if present.
KINDS: dict[str, type] = {
    "step": int,
    "run": str,
    "attempt": str,
    "config": dict,
    "model_args": dict,
    "fingerprints": dict,
}


def write_manifest(
    folder: Path, files: dict[str, dict[str, Any]], metadata: dict[str, Any]
) -> None:
    """Write and fsync ``manifest.json``: ``metadata``, and ``files`` with their sizes and hashes.

    Raises ``FileExistsError`` if there is one.
    """
    content = {**metadata, "files": files}
    text = json.dumps({"checksum": _checksum(content), **content}, indent=1)
    write_hashed(folder / MANIFEST_FILE, text.encode())


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest; raise ``ValueError`` if it is missing, malformed or damaged.

    Raises ``OSError`` as ``read_checked`` does.
    """
    path = folder / MANIFEST_FILE
    try:
        content = json.loads(read_checked(lambda: read_file(path)))
        checksum = content.pop("checksum")
        # + 0 raises TypeError unless it is a number.
        files = {name: (d["size"] + 0, d["xxh3_128"]) for name, d in content["files"].items()}
        expected = _checksum(content)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None
    if checksum != expected:
        raise ValueError(f"{path}: checksum mismatch")
    for name in files:
        if not FILE_NAME.fullmatch(name):
            raise ValueError(f"{path}: {name!r} is not a plain file name")
    for key, kind in KINDS.items():
        if type(content.get(key, kind())) is not kind:
            raise ValueError(f"{path}: {key} is not of type {kind.__name__}")
    if not all(isinstance(table, dict) for table in content.get("config", {}).values()):
        raise ValueError(f"{path}: config has a key outside of a table")
    return content


def manifest_digest(folder: Path) -> str:
    """Hash of the manifest's bytes, equal for equal checkpoints; what damaged it without them.

    Raises ``OSError`` as ``read_checked`` does.
    """
    try:
        content = read_checked(lambda: read_file(folder / MANIFEST_FILE))
    except ValueError as error:
        return str(error)
    return xxhash.xxh3_128(content).hexdigest()


def _checksum(content: dict[str, Any]) -> str:
    """Hash of the manifest's own content, which its list of files cannot contain."""
    return xxhash.xxh3_128(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sizes_of(manifest: Mapping[str, Any]) -> dict[str, int]:
    """Size in bytes of each file that the manifest lists."""
    return {name: description["size"] for name, description in manifest["files"].items()}


def verify_files(
    folder: Path,
    files: dict[str, Any],
    names: Iterable[str],
    raise_if_stopped: Callable[[], None] = lambda: None,
) -> list[str]:
    """Hash the files ``names``; return a problem for each that is missing or was changed.

    Raises ``OSError`` as ``read_checked`` does. ``raise_if_stopped``: as in ``describe_file``.
    """

    def actual(name: str) -> dict[str, Any] | None:
        # A wrong size needs no hash, and a file of wrong size may be of any size.
        with open_file(folder / name) as file:
            size = os.fstat(file.fileno()).st_size
        is_whole = files[name] is not None and size == files[name]["size"]
        return describe_file(folder / name, raise_if_stopped) if is_whole else None

    found = []
    for name in names:
        try:
            description = read_checked(partial(actual, name))
        except ValueError as error:
            found.append(f"{folder / name}: {error}")
            continue
        if description is None or description != files[name]:
            found.append(f"{folder / name}: size or hash mismatch")
    return found
