"""Plain text files as documents, among them the corpus that every machine has: Python's source."""

import glob
import hashlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import overload

import numpy as np
import torch

# Long files are read in pieces, so that a row does not dwell on one file for many steps.
PIECE_BYTES = 1 << 14
NOT_LIBRARY = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"}


def builtin_files() -> list[tuple[Path, str]]:
    """(path, name) of the standard library's sources, tests left out, and of torch's own.

    Read in place. Contents vary with the Python and torch versions, so losses on them compare only
    within one machine.
    """
    library = Path(sysconfig.get_path("stdlib"))
    package = Path(torch.__file__).parent
    files = [
        (path, f"python/{path.relative_to(library).as_posix()}")
        for path in library.rglob("*.py")
        if not NOT_LIBRARY & set(path.relative_to(library).parts)
    ]
    files += [
        (path, f"torch/{path.relative_to(package).as_posix()}") for path in package.rglob("*.py")
    ]
    return sorted(files, key=lambda file: file[1])


def matching_files(pattern: str) -> list[tuple[Path, str]]:
    """(path, name) of what the glob ``data.path`` matches; raise ``ValueError`` if nothing."""
    paths = sorted(path for path in map(Path, glob.glob(pattern, recursive=True)) if path.is_file())
    if not paths:
        raise ValueError(f"data.path: no file matches {pattern!r}")
    anchor = Path(pattern.split("*")[0])
    root = anchor if anchor.is_dir() else anchor.parent
    return [(path, path.relative_to(root).as_posix()) for path in paths]


class TextFiles(Sequence[str]):
    """Pieces of at most about 16 KiB that end at line ends; the files stay where they are."""

    def __init__(self, files: list[tuple[Path, str]], *, encoding_errors: str) -> None:
        self._files, self._errors = files, encoding_errors
        sizes = [path.stat().st_size for path, _ in files]
        counts = [-(-size // PIECE_BYTES) for size in sizes]
        self._ends = np.cumsum(counts)
        self.keys = np.repeat(np.array([name_key(name) for _, name in files], np.uint64), counts)
        """Of each piece, a uniform uint64 that depends on its file's name alone."""
        listing = "\n".join(f"{name} {size}" for (_, name), size in zip(files, sizes, strict=True))
        self.fingerprint = hashlib.sha256(listing.encode()).hexdigest()

    def __len__(self) -> int:
        return int(self._ends[-1])

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        file = int(np.searchsorted(self._ends, index, side="right"))
        piece = int(index - (self._ends[file - 1] if file else 0))
        path, _ = self._files[file]
        try:
            return _read_piece(path, piece).decode("utf-8", self._errors)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: piece {piece} is not UTF-8: {error}") from None


def name_key(name: str) -> int:
    """A uniform uint64 from a name, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _read_piece(path: Path, piece: int) -> bytes:
    """The lines whose first byte is in the ``piece``-th PIECE_BYTES of the file."""
    start, end = piece * PIECE_BYTES, (piece + 1) * PIECE_BYTES
    with path.open("rb") as file:
        if start > 0:
            file.seek(start - 1)
            file.readline()  # the end of a line that the piece before has
        text = file.read(max(0, end - file.tell()))
        return text if text.endswith(b"\n") or not text else text + file.readline()
