"""Damage to a file of a run: what kills, full disks, other programs and attackers leave."""

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path


def _write(content: bytes, path: Path) -> None:
    path.write_bytes(content)


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "file").touch()


def _sparse(path: Path) -> None:
    path.touch()
    # Claims more than any memory holds.
    os.truncate(path, 1 << 42)


def _unreadable(path: Path) -> None:
    path.write_text("1\n")
    path.chmod(0)


CONTENTS = {
    "empty": b"",
    "binary": b"\xff\x00\xfe\n\xff",
    "torn": b'{"step": 1, "time": 1',
    "text": b"abc\n",
    "a time that is text": b'{"step": 1, "time": "abc", "attempt": "abc", "progress": []}\n',
    "other JSON": b'[1]\n7\nnull\n"abc"\n{"step": {}, "time": null}\n{"attempt": 1e999}\n',
    "huge numbers": b'{"step": 1, "time": 1' + b"0" * 400 + b"}\n" + b"9" * 5000 + b"\n",
    "deep": b"[" * 100_000 + b"\n" + b'{"a":' * 100_000,
}
DAMAGES: dict[str, Callable[[Path], None]] = {
    **{name: partial(_write, content) for name, content in CONTENTS.items()},
    "folder": _folder,
    "fifo": lambda path: os.mkfifo(path),
    "link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "link to nowhere": lambda path: path.symlink_to("nowhere"),
    "sparse": _sparse,
    "unreadable": _unreadable,
}


def damage(path: Path, name: str) -> None:
    """Put the damage ``name`` in the place of ``path``, which need not exist."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    DAMAGES[name](path)
