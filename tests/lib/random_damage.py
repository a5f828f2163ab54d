"""Random damage to a file, and what a program that meets it must not do."""

import json
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from checkpoint.hashed_file import describe_file
from checkpoint.manifest import MANIFEST_FILE, read_manifest, write_manifest
from data.files import TOKEN_INDEX_FILE
from data.token_files import encode_index

PAGE = 4096
SHAPES = ["[]", "{}", "null", "true", '"text"', "-1", "0.5", "NaN", "[[]]", '{"a": {}}', "[" * 9999]
HUGE = ["2147483648", "9223372036854775807", "9" * 30, "9" * 5000, "1e999", "-9223372036854775809"]

Damage = Callable[[random.Random, Path], None]


def truncate(rng: random.Random, path: Path) -> None:
    content = path.read_bytes()
    replace(path, content[: rng.randrange(len(content) or 1)])


def flip_bit(rng: random.Random, path: Path) -> None:
    content = bytearray(path.read_bytes() or b"\0")
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    replace(path, bytes(content))


def zero_page(rng: random.Random, path: Path) -> None:
    """Zero a page; of a smaller file, all from a random place on."""
    content = path.read_bytes()
    start = rng.randrange(len(content) or 1)
    page = content[start : start + PAGE]
    replace(path, content[:start] + bytes(len(page)) + content[start + PAGE :])


def delete(rng: random.Random, path: Path) -> None:
    path.unlink()


def empty(rng: random.Random, path: Path) -> None:
    replace(path, b"")


def become_folder(rng: random.Random, path: Path) -> None:
    path.unlink()
    path.mkdir()


def become_link(rng: random.Random, path: Path) -> None:
    """Link to nothing, to an endless device, to itself, or to a file of ``outside``."""
    outside = next(p for p in path.parents if (p.parent / "outside").is_dir()).parent / "outside"
    path.unlink()
    path.symlink_to(rng.choice([outside / "nothing", "/dev/zero", path.name, outside / "file"]))


def become_pipe(rng: random.Random, path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def become_other(rng: random.Random, path: Path) -> None:
    """Become another file of the folder."""
    others = [p for p in sorted(path.parent.iterdir()) if p.is_file() and p != path] or [path]
    replace(path, rng.choice(others).read_bytes())


def become_noise(rng: random.Random, path: Path) -> None:
    replace(path, rng.randbytes(rng.choice([1, 100, 10_000])))


def reshape_json(rng: random.Random, path: Path) -> None:
    """Replace a value in the file's JSON, or in one of its lines, by one of another type."""
    change_json(rng, path, SHAPES, lambda value: True)


def enlarge_number(rng: random.Random, path: Path) -> None:
    """Replace a number in the file by a huge one; in binary files, 8 bytes."""
    content = path.read_bytes()
    if b"\0" in content:
        start = rng.choice([rng.randrange(64), rng.randrange(len(content))])
        huge = rng.choice([b"\xff" * 8, b"\xff" * 7 + b"\x7f", b"\0" * 7 + b"\x40"])
        replace(path, content[:start] + huge + content[start + 8 :])
    elif not change_json(rng, path, HUGE, lambda value: type(value) in (int, float)):
        places = list(re.finditer(rb"\d+", content)) or [re.match(b"", content)]
        start, end = rng.choice(places).span()  # type: ignore[union-attr]
        replace(path, content[:start] + rng.choice(HUGE).encode() + content[end:])


DAMAGES: tuple[Damage, ...] = (
    truncate, flip_bit, zero_page, delete, empty, become_folder, become_link, become_pipe,
    become_other, become_noise, reshape_json, reshape_json, enlarge_number,
)  # fmt: skip


def damage(rng: random.Random, path: Path) -> str:
    """Damage a file in a random way and return the way.

    A folder ``outside`` beside the damaged one has a file to which links lead. Hashes and checksums
    of what was changed in JSON are updated in every other case.
    """
    way = rng.choice(DAMAGES)
    way(rng, path)
    is_forged = way in (reshape_json, enlarge_number) and rng.random() < 0.5
    if is_forged and path.name != MANIFEST_FILE:
        _update_manifest(path)
    return way.__name__


def change_json(
    rng: random.Random, path: Path, values: list[str], is_changed: Callable[[Any], bool]
) -> bool:
    """Replace a value for which ``is_changed`` by one of ``values``; return True if there is one.

    If the file is not JSON, it becomes one of ``values``.
    """
    text = path.read_bytes().decode(errors="replace")
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    number = rng.randrange(len(lines)) if lines else 0
    try:
        content = json.loads(lines[number])
    except (ValueError, IndexError):
        if values is SHAPES:
            replace(path, rng.choice(values).encode())
        return values is SHAPES
    root = [content]
    places = [(parent, key) for parent, key in _places(root) if is_changed(parent[key])]
    if not places:
        return False
    parent, key = rng.choice(places)
    parent[key] = mark = "the value that is replaced"
    has_checksum = isinstance(root[0], dict) and "checksum" in root[0] and rng.random() < 0.5
    chosen = rng.choice(values)
    if has_checksum:
        try:
            parent[key] = json.loads(chosen)
        except (ValueError, RecursionError):
            parent[key] = -1
        lines[number] = _with_checksum(path, root[0])
    else:
        lines[number] = json.dumps(root[0]).replace(json.dumps(mark), chosen)
    replace(path, "\n".join([*lines, ""] if path.suffix == ".jsonl" else lines).encode())
    return True


def replace(path: Path, content: bytes) -> None:
    """Write a new file, because the old one may be linked elsewhere."""
    path.unlink()
    path.write_bytes(content)


def contents(folder: Path) -> dict[str, str]:
    """Describe each file, link and folder below ``folder``."""
    return {str(path.relative_to(folder)): _describe(path) for path in sorted(folder.rglob("*"))}


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value of parsed JSON, few of long lists."""
    keys = list(node) if isinstance(node, dict) else range(min(len(node), 20))
    for key in keys:
        yield node, key
        if isinstance(node[key], dict | list):
            yield from _places(node[key])


def _with_checksum(path: Path, content: Any) -> str:
    del content["checksum"]
    if path.name == TOKEN_INDEX_FILE:
        return encode_index(content).decode()
    checksum = xxhash.xxh3_128(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({"checksum": checksum, **content})


def _update_manifest(path: Path) -> None:
    """Update size and hash of a checkpoint's file in its manifest."""
    manifest_path = path.with_name(MANIFEST_FILE)
    if path.is_file() and manifest_path.exists():
        manifest = read_manifest(path.parent)
        manifest["files"][path.name] = describe_file(path)
        manifest_path.unlink()
        write_manifest(path.parent, manifest.pop("files"), manifest)


def _describe(path: Path) -> str:
    if path.is_symlink():
        return f"link to {os.readlink(path)}"
    if path.is_file():
        return xxhash.xxh3_128(path.read_bytes()).hexdigest()
    return "folder" if path.is_dir() else "neither"
