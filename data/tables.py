"""Documents in rows of tables: Parquet and Arrow files where they lie, JSON and CSV converted."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate
from threading import Lock
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq

from data.columns import check_column, check_no_null
from data.files import FINGERPRINT_SAMPLES, evenly_spaced, find_shard, record_hashes
from data.formats import Format
from data.remote_errors import StorageError
from data.storage import (
    DataPath,
    check_size,
    copy_remote,
    for_each,
    local_path,
    open_for_arrow,
)

# Decoded row groups that a process keeps, in bytes.
CACHED_BYTES = 1 << 30
# Largest row group that is decoded, because all of it must be in memory.
MAX_GROUP_BYTES = 1 << 32
MAX_OPEN_FILES = 64
# The column that data.text_key names if it is not set.
DEFAULT_COLUMN = "text"


class RowGroup(NamedTuple):
    """Rows that are decoded together: a row group of a Parquet file, or all rows of another."""

    file: int
    number: int
    first_row: int
    n_rows: int


class Tables:
    """Rows of table files, of which only the text column is read.

    Raises ``ValueError`` for a file that cannot be read, or whose column is not text; without
    ``skips_bad`` also for a text that is null.
    """

    def __init__(
        self, files: list[tuple[DataPath, str, Format]], text_key: str, *, skips_bad: bool = False
    ) -> None:
        self._files, self._text_key, self._skips_bad = files, text_key, skips_bad
        self._columns: dict[int, pa.ChunkedArray] = {}
        self._open = lru_cache(maxsize=MAX_OPEN_FILES)(self._open_parquet)
        self._sizes: dict[DataPath, int] = {}
        self._groups: list[RowGroup] = []
        copy_remote(path for path, _, file_format in files if file_format == "arrow")
        parquet = [i for i, (_, _, file_format) in enumerate(files) if file_format == "parquet"]
        groups = for_each(self._parquet_groups, parquet, of=files[0][0])
        groups_of = dict(zip(parquet, groups, strict=True))
        for index, (path, _, file_format) in enumerate(files):
            if index in groups_of:
                self._groups += groups_of[index]
            else:
                column = _open_column(path, file_format, text_key, skips_bad)
                self._columns[index] = column
                self._groups.append(RowGroup(index, 0, 0, len(column)))
        self._ends = list(accumulate(group.n_rows for group in self._groups))
        self._decoded: OrderedDict[int, pa.ChunkedArray] = OrderedDict()
        self._decoded_lock = Lock()

    @property
    def paths(self) -> list[DataPath]:
        return [path for path, _, _ in self._files]

    def place(self, index: int) -> str:
        number, row = find_shard(self._ends, index)
        group = self._groups[number]
        return f"{self._files[group.file][0]}, row {group.first_row + row}"

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> str | None:
        number, row = find_shard(self._ends, index)
        group = self._groups[number]
        path = self._files[group.file][0]
        column = self._columns[group.file] if group.file in self._columns else self._group(number)
        try:
            if group.file in self._columns and not pa.types.is_dictionary(column.type):
                # A damaged offset leads out of the mapped file. Checking all at once reads it all.
                column[row : row + 1].validate(full=True)
            text = column[row].as_py()
        except (UnicodeDecodeError, pa.ArrowInvalid) as error:
            where = f"{path}: row {group.first_row + row}"
            raise ValueError(f"{where} is not UTF-8, or damaged: {error}") from None
        if text is None and not self._skips_bad:
            # Parquet need not say how many are null.
            check_no_null(column[row : row + 1], self._text_key, path, group.first_row + row)
        return text

    @property
    def split_hashes(self) -> np.ndarray:
        """Uniform uint64 per row that depends only on its file's name and its row number."""
        counts = [0] * len(self._files)
        for group in self._groups:
            counts[group.file] += group.n_rows
        names = (name for _, name, _ in self._files)
        parts = [record_hashes(name, n) for name, n in zip(names, counts, strict=True)]
        return np.concatenate([np.empty(0, np.uint64), *parts])

    @property
    def groups(self) -> np.ndarray | None:
        """Number of the row group of each row (n,), to decode few at a time; None if none is."""
        if len(self._columns) == len(self._files):
            return None
        return np.repeat(np.arange(len(self._groups)), [group.n_rows for group in self._groups])

    def samples(self) -> list[int]:
        """Evenly spaced rows that need no decoding; ``footers`` identify those of Parquet files."""
        indices = evenly_spaced(len(self), FINGERPRINT_SAMPLES)
        files = {i: self._groups[find_shard(self._ends, i)[0]].file for i in indices}
        return [index for index, file in files.items() if file in self._columns]

    @property
    def footers(self) -> str:
        """Hash of the column's name and the metadata of Parquet files; "" if there is none.

        Metadata are sizes, statistics and places of all columns.
        """
        if self.groups is None:
            return ""
        paths = [path for path, _, file_format in self._files if file_format == "parquet"]
        footers = for_each(_read_footer, paths, of=paths[0])
        # The default column adds nothing: runs whose checkpoints are older must resume.
        column = b"" if self._text_key == DEFAULT_COLUMN else self._text_key.encode()
        return hashlib.sha256(b"".join(footers) + column).hexdigest()

    def _parquet_groups(self, index: int) -> list[RowGroup]:
        path = self._files[index][0]
        groups, first_row = [], 0
        with _reading(path):
            file = self._open(path)
            check_column(file.schema_arrow, self._text_key, path)
            # The path of a.b may be that of the field b of a column a, but its own name is not.
            leaves = map(file.schema.column, range(len(file.schema)))
            (leaf,) = (i for i, c in enumerate(leaves) if c.name == c.path == self._text_key)
            for number in range(file.num_row_groups):
                metadata = file.metadata.row_group(number)
                column = metadata.column(leaf)
                size = column.total_uncompressed_size
                if size > MAX_GROUP_BYTES:
                    text = f"row group {number} has {size:,} bytes of text; write smaller ones"
                    raise ValueError(f"data.path: {path}: {text}")
                groups.append(RowGroup(index, number, first_row, metadata.num_rows))
                nulls = column.statistics.null_count if column.is_stats_set else 0
                if nulls and not self._skips_bad:
                    check_no_null(self._texts(groups[-1]), self._text_key, path, first_row)
                first_row += metadata.num_rows
        return groups

    def _group(self, number: int) -> pa.ChunkedArray:
        """Texts of a row group. Keeps those used last, of up to CACHED_BYTES, and at least two."""
        with self._decoded_lock:
            if number in self._decoded:
                self._decoded.move_to_end(number)
                return self._decoded[number]
        texts = self._texts(self._groups[number])
        with self._decoded_lock:
            self._decoded[number] = texts
            size = sum(each.nbytes for each in self._decoded.values())
            while size > CACHED_BYTES and len(self._decoded) > 2:
                size -= self._decoded.popitem(last=False)[1].nbytes
        return texts

    def _texts(self, group: RowGroup) -> pa.ChunkedArray:
        path = self._files[group.file][0]
        with _reading(path):
            table = self._open(path).read_row_group(group.number, columns=[self._text_key])
            return table.column(self._text_key)

    def _open_parquet(self, path: DataPath) -> pq.ParquetFile:
        # Few files are open at a time, and one that is opened again may be another.
        check_size(path, self._sizes.setdefault(path, path.stat().st_size))
        source = open_for_arrow(path)
        # A file would keep what it had buffered, and threads share it.
        return pq.ParquetFile(
            source, memory_map=True, pre_buffer=False, page_checksum_verification=True
        )


def _read_footer(path: DataPath) -> bytes:
    with path.open("rb") as file:
        # The last eight bytes are the length of the footer and a magic number.
        end = file.seek(-8, 2)
        file.seek(end - int.from_bytes(file.read(4), "little"))
        return file.read()


def _open_column(
    path: DataPath, file_format: Format, text_key: str, skips_bad: bool
) -> pa.ChunkedArray:
    """Map the text column of an Arrow file, or of the conversion of a JSON or CSV file."""
    if file_format != "arrow":
        # Imported here, because datasets takes a second to import.
        from data.hub import convert_records

        return convert_records(path, file_format, text_key, skips_bad=skips_bad)
    with _reading(path):
        source = pa.memory_map(str(local_path(path)))
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        table = (ipc.open_file(source) if is_file else ipc.open_stream(source)).read_all()
        check_column(table.schema, text_key, path)
        column = table.column(text_key)
        column.validate(full=pa.types.is_dictionary(column.type))
    if not skips_bad:
        check_no_null(column, text_key, path)
    return column


@contextmanager
def _reading(path: DataPath) -> Iterator[None]:
    """Name the file in errors of pyarrow."""
    try:
        yield
    except (StorageError, MemoryError):
        # pyarrow's own MemoryError is an ArrowException too.
        raise
    except pa.ArrowException as error:
        raise ValueError(f"data.path: {path}: {error}") from None
    except OSError as error:
        # pyarrow reports broken files, too, as OSError, but without an errno.
        kind = OSError if error.errno else ValueError
        raise kind(f"data.path: {path}: {error}") from None
