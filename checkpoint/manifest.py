"""The list that makes a folder a checkpoint: every file with its size and SHA-256."""

import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

NAME = "manifest.json"
# A name and nothing more: it cannot lead out of the folder.
FILE_NAME = re.compile(r"\.?\w[\w.-]*")


def write_manifest(folder: Path, files: dict[str, dict[str, Any]], facts: dict[str, Any]) -> None:
    """Write and fsync ``manifest.json`` for ``files``, as ``describe_file`` gives them."""
    write_durably(folder / NAME, json.dumps({**facts, "files": files}, indent=1).encode())


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest; raise ``ValueError`` if there is none that can be read."""
    try:
        manifest = json.loads((folder / NAME).read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / NAME}: {error}") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise ValueError(f"{folder / NAME}: not a manifest")
    for name in manifest["files"]:
        if not FILE_NAME.fullmatch(name):
            raise ValueError(f"{folder / NAME}: {name!r} is not the name of a file")
    return manifest


def faults(folder: Path, files: dict[str, Any], names: Iterable[str]) -> list[str]:
    """What is wrong with the files ``names``: missing, or not what was written."""
    found = []
    for name in names:
        try:
            actual = describe_file(folder / name)
        except OSError as error:
            found.append(f"{folder / name}: {error.strerror}")
            continue
        if actual != files[name]:
            found.append(f"{folder / name}: contents are not what was saved")
    return found


def describe_file(path: Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"size": path.stat().st_size, "sha256": digest}


def write_durably(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make renames in ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
