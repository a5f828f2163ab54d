"""Plain text files as documents, and a corpus that every machine has: Python's source."""

import glob
import importlib.util
import os
import sysconfig
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import numpy as np

from data.files import locate, name_key, named

# Long files are read in pieces, so that a row does not dwell on one file for many steps.
PIECE_BYTES = 1 << 14
NOT_LIBRARY = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"}


def builtin_files() -> list[tuple[Path, str]]:
    """(path, name) of the sources of the standard library and of torch, their tests left out.

    Read in place. Contents vary with the Python and torch versions, so losses on them compare only
    within one machine.
    """
    # Located without importing it, which takes seconds.
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    roots = {"python": Path(sysconfig.get_path("stdlib")), "torch": Path(torch.origin).parent}
    return sorted(
        (
            (path, f"{top}/{path.relative_to(root).as_posix()}")
            for top, root in roots.items()
            for path in _python_files(root)
        ),
        key=lambda file: file[1],
    )


def matching_files(pattern: str) -> list[tuple[Path, str]]:
    """(path, name) of what the glob ``data.path`` matches; raise ``ValueError`` if nothing."""
    paths = sorted(path for path in map(Path, glob.glob(pattern, recursive=True)) if path.is_file())
    if not paths:
        text = f"data.path: no file matches {pattern!r}"
        if Path(pattern).is_dir():
            text += f"; it is a folder: try {pattern.rstrip('/')}/**/*.txt"
        raise ValueError(text)
    return named(pattern, paths)


class TextFiles:
    """Pieces of about 16 KiB, cut after a line where one ends soon; the files stay in place."""

    def __init__(self, files: list[tuple[Path, str]], *, encoding_errors: str) -> None:
        self._files, self._errors = files, encoding_errors
        counts = [-(-path.stat().st_size // PIECE_BYTES) for path, _ in files]
        self._ends = list(accumulate(counts))
        keys = [name_key(name) for _, name in files]
        if sum(count > 0 for count in counts) == 1:
            # Nothing could be held out of a single file if it were taken as a whole.
            (name, count), *_ = ((n, c) for (_, n), c in zip(files, counts, strict=True) if c > 0)
            keys = [name_key(f"{name} {piece}") for piece in range(count)]
            counts = [1] * count
        self.keys = np.repeat(np.array(keys, np.uint64), counts)
        """For each piece, a uniform uint64 made of its file's name; where there is a single file,
        of the piece's number too."""

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> str:
        file, piece = locate(self._ends, index)
        path, _ = self._files[file]
        start, content = _read_piece(path, piece)
        try:
            return content.decode("utf-8", self._errors)
        except UnicodeDecodeError as error:
            text = f"{path}, byte {start + error.start}: not UTF-8: {error.reason}"
            raise ValueError(text) from None


def _python_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        # Not entered at all: installed packages are many times the library.
        subfolders[:] = set(subfolders) - NOT_LIBRARY
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _read_piece(path: Path, piece: int) -> tuple[int, bytes]:
    """Where the piece starts in the file, and its bytes."""
    with path.open("rb") as file:
        start, end = _cut(file, piece), _cut(file, piece + 1)
        file.seek(start)
        return start, file.read(end - start)


def _cut(file: BinaryIO, piece: int) -> int:
    """Where a piece starts: after the line, or else character, that crosses piece * PIECE_BYTES.

    A line that goes on for another PIECE_BYTES is cut, so that every piece is shorter than two.
    """
    start = piece * PIECE_BYTES
    if piece == 0:
        return start
    file.seek(start - 1)
    line = file.readline(PIECE_BYTES)
    if line.endswith(b"\n") or len(line) < PIECE_BYTES:
        return start - 1 + len(line)
    # UTF-8 continues a character with at most three bytes of the form 10xxxxxx.
    return start + next((i for i in range(3) if line[1 + i] & 0xC0 != 0x80), 3)
