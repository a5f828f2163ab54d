"""The list that makes a folder a checkpoint: facts of its run, and every file's size and hash."""

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

from checkpoint.storage import HashedFile, describe_file, read_file

NAME = "manifest.json"
# A name and nothing more: it cannot lead out of the folder.
FILE_NAME = re.compile(r"\w[\w.-]*")


def write_manifest(folder: Path, files: dict[str, dict[str, Any]], facts: dict[str, Any]) -> None:
    """Write and fsync ``manifest.json`` for ``files``, each with its size and hash."""
    content = {**facts, "files": files}
    file = HashedFile(folder / NAME)
    file.write(json.dumps({"checksum": _checksum(content), **content}, indent=1).encode())
    file.close()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest; raise ``ValueError`` if there is none, or it is not what was written."""
    path = folder / NAME
    try:
        content = json.loads(read_file(path))
        checksum = content.pop("checksum")
        files = {name: (d["size"] + 0, d["xxh3_128"]) for name, d in content["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None
    if checksum != _checksum(content):
        raise ValueError(f"{path}: contents are not what was saved")
    for name in files:
        if not FILE_NAME.fullmatch(name):
            raise ValueError(f"{path}: {name!r} is not the name of a file")
    return content


def _checksum(content: dict[str, Any]) -> str:
    """The manifest lists all hashes but its own; this is that one."""
    return xxhash.xxh3_128(json.dumps(content, sort_keys=True).encode()).hexdigest()


def faults(folder: Path, files: dict[str, Any], names: Iterable[str]) -> list[str]:
    """What is wrong with the files ``names``: missing, or not what was written."""
    found = []
    for name in names:
        try:
            actual = describe_file(folder / name)
        except OSError as error:
            found.append(f"{folder / name}: {error.strerror or error}")
            continue
        if actual != files[name]:
            found.append(f"{folder / name}: contents are not what was saved")
    return found


def sync_folder(folder: Path) -> None:
    """Make renames in ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
