"""Files compressed by gzip, bzip2, xz or zstd, recognized by their first bytes."""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, cast

from data.storage import DataPath

_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
# After the level: digits of pi before a block, and of its root at the end.
_BZIP2_BLOCKS = (b"1A", b"\x17r")
# A frame that zstd tools may put first: 0x184D2A50 to 0x184D2A5F.
_ZSTD_SKIPPABLE = b"\x2a\x4d\x18"
# Compressed bytes that are decompressed at once, because each may become 32 KiB.
_ZSTD_CHUNK = 1024


def compression_of(head: bytes) -> str:
    """Name of the compression of a file that begins with ``head``, "" if there is none."""
    if head[1:4] == _ZSTD_SKIPPABLE and 0x50 <= head[0] <= 0x5F:
        return "zstd"
    name = next((name for magic, name in _MAGIC.items() if head.startswith(magic)), "")
    # A text may begin with the letters of bzip2, but not with those of its first block too.
    return "" if name == "bzip2" and head[4:6] not in _BZIP2_BLOCKS else name


@contextmanager
def open_decompressed(path: DataPath) -> Iterator[BinaryIO]:
    """Open a file for reading, decompressed as its first bytes say; memory is bounded.

    Raises ``ValueError`` if it is truncated or corrupt, or its package is not installed.
    """
    with path.open("rb") as raw:
        name = compression_of(raw.read(6))
        raw.seek(0)
        try:
            file = _decompressed(raw, name)
        except ImportError as error:
            raise ValueError(f"{path}: zstd needs the package zstandard: {error}") from None
        try:
            yield file
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            # Errors of the disk have an errno.
            if isinstance(error, OSError) and error.errno is not None:
                raise
            where = f"{path}, after byte {file.tell()} of its text"
            raise ValueError(f"{where}: truncated or corrupt {name}: {error}") from None


def _decompressed(raw: BinaryIO, name: str) -> BinaryIO:
    if name == "gzip":
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if name == "bzip2":
        return cast(BinaryIO, bz2.BZ2File(raw))
    if name == "xz":
        return cast(BinaryIO, lzma.LZMAFile(raw))
    return io.BufferedReader(_ZstdReader(raw), 1 << 18) if name == "zstd" else raw


class _ZstdReader(io.RawIOBase):
    """Decompressed bytes of concatenated zstd frames; zstandard itself ignores a torn last one."""

    def __init__(self, file: BinaryIO) -> None:
        # Imported here, because only .zst files need the package.
        import zstandard

        self._file, self._new, self._error = file, zstandard.ZstdDecompressor, zstandard.ZstdError
        self._decompressor = self._new().decompressobj()
        self._input, self._output, self._is_in_frame = b"", memoryview(b""), False
        self._position = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while not self._output:
            self._input = self._input or self._file.read(_ZSTD_CHUNK)
            if not self._input:
                if self._is_in_frame:
                    raise EOFError("it ends within a frame")
                return 0
            try:
                self._output = memoryview(self._decompressor.decompress(self._input))
            except self._error as error:
                raise EOFError(str(error)) from None
            is_end = self._decompressor.eof
            self._is_in_frame, self._input = not is_end, self._decompressor.unused_data
            if is_end:
                self._decompressor = self._new().decompressobj()
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        self._position += count
        return count
