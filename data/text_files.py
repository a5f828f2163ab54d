"""Plain text files as documents; the builtin corpus, source code of Python and torch."""

import importlib.util
import os
import sysconfig
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import numpy as np

from data.files import find_shard, name_hash
from data.storage import DataPath, check_size, copy_remote, local_path

# Size of the pieces of long files, so that a row does not read one file for many steps.
PIECE_BYTES = 1 << 14
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"}


@cache
def builtin_files() -> list[tuple[DataPath, str]]:
    """(path, name) of the Python files of the standard library and of torch, without tests.

    Contents vary with the Python and torch versions, so losses are comparable only on one machine.
    """
    # find_spec does not import torch, which would take seconds.
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    roots = {"python": Path(sysconfig.get_path("stdlib")), "torch": Path(torch.origin).parent}
    files = (file for top, root in roots.items() for file in _python_files(root, top))
    return sorted(files, key=lambda file: file[1])


class TextFiles:
    """Pieces of about 16 KiB of text files in UTF-8, split after a line if one ends soon."""

    groups = None

    def __init__(
        self,
        files: list[tuple[DataPath, str]],
        sizes: Mapping[DataPath, int],
        *,
        encoding_errors: str,
    ) -> None:
        """``files``: (path, name). ``sizes``: in bytes, of at least these."""
        self._files, self._errors = files, encoding_errors
        copy_remote(path for path, _ in files)
        self._sizes = [sizes[path] for path, _ in files]
        counts = [-(-size // PIECE_BYTES) for size in self._sizes]
        self._ends = list(accumulate(counts))
        hashes = [name_hash(name) for _, name in files]
        if sum(count > 0 for count in counts) == 1:
            # A single file is split by pieces, because otherwise nothing could be held out.
            (name, count), *_ = ((n, c) for (_, n), c in zip(files, counts, strict=True) if c > 0)
            hashes = [name_hash(f"{name} {piece}") for piece in range(count)]
            counts = [1] * count
        self.split_hashes = np.repeat(np.array(hashes, np.uint64), counts)
        """Uniform uint64 per piece: hash of its file's name, and of its number in a single file."""

    @property
    def paths(self) -> list[DataPath]:
        return [path for path, _ in self._files]

    def place(self, index: int) -> str:
        file, piece = find_shard(self._ends, index)
        return f"{self._files[file][0]}, piece {piece}"

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> str:
        file, piece = find_shard(self._ends, index)
        path, _ = self._files[file]
        check_size(path, self._sizes[file])
        start, content = _read_piece(local_path(path), piece)
        try:
            text = content.decode("utf-8", self._errors)
            return text.removeprefix("\ufeff") if piece == 0 else text
        except UnicodeDecodeError as error:
            text = f"{path}, byte {start + error.start}: not UTF-8: {error.reason}"
            raise ValueError(text) from None


def _python_files(root: Path, top: str) -> Iterator[tuple[DataPath, str]]:
    """(path, name) of the files below ``root``, which the names call ``top``."""
    for folder, subfolders, names in os.walk(root):
        place = top + folder.removeprefix(str(root)).replace(os.sep, "/")
        # Do not walk these: installed packages are many times the size of the library.
        subfolders[:] = set(subfolders) - SKIPPED_FOLDERS
        yield from ((Path(folder, n), f"{place}/{n}") for n in names if n.endswith(".py"))


def _read_piece(path: Path, piece: int) -> tuple[int, bytes]:
    """(offset in the file, bytes) of a piece."""
    with path.open("rb") as file:
        start, end = _piece_start(file, piece), _piece_start(file, piece + 1)
        file.seek(start)
        return start, file.read(end - start)


def _piece_start(file: BinaryIO, piece: int) -> int:
    """Offset of a piece: after the line, or else character, that crosses piece * PIECE_BYTES.

    Lines longer than another PIECE_BYTES are split, so every piece is shorter than 2 PIECE_BYTES.
    """
    start = piece * PIECE_BYTES
    if piece == 0:
        return start
    file.seek(start - 1)
    line = file.readline(PIECE_BYTES)
    if line.endswith(b"\n") or len(line) < PIECE_BYTES:
        return start - 1 + len(line)
    # A UTF-8 character has at most three continuation bytes (10xxxxxx).
    return start + next((i for i in range(3) if line[1 + i] & 0xC0 != 0x80), 3)
