"""Documents in rows of tables, read by Hugging Face ``datasets`` from files or the hub."""

import gzip
import hashlib
import json
import reprlib
import zlib
from collections.abc import Iterator
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from textwrap import shorten
from typing import Any

import datasets
import numpy as np

from config.job_config import DataSource
from data.files import find_shard, record_hashes

C4 = ("allenai/c4", "en", "text")
COMPRESSED = (".jsonl.gz", ".jsonl.zst")


class Tables:
    """Rows of .jsonl and .parquet files; converted to Arrow once, then memory-mapped."""

    def __init__(
        self, files: list[tuple[Path, str]], text_key: str, *, skips_bad: bool = False
    ) -> None:
        others = [str(path) for path, _ in files if not (_is_json(path) or _is_parquet(path))]
        if others:
            more = f" and {len(others) - 3} more" if len(others) > 3 else ""
            text = f"data.path: mixes tables with plain text files: {', '.join(others[:3])}{more}"
            raise ValueError(f"{text}; use two [[data.sources]]")
        self._files = files
        # Only the text column, because reading a row of all columns takes several times as long.
        self._columns = [_read_table(path, text_key, skips_bad).data[text_key] for path, _ in files]
        self._ends = list(accumulate(map(len, self._columns)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> str | None:
        table, row = find_shard(self._ends, index)
        try:
            return self._columns[table][row].as_py()
        except UnicodeDecodeError as error:
            path, _ = self._files[table]
            raise ValueError(f"{path}: row {row} is not UTF-8: {error}") from None

    @property
    def split_hashes(self) -> np.ndarray:
        """Uniform uint64 per row that depends only on its file's name and its row number."""
        names = (name for _, name in self._files)
        columns = zip(names, self._columns, strict=True)
        return np.concatenate([record_hashes(name, len(column)) for name, column in columns])


class HubTable:
    """Split "train" of a hub dataset, downloaded completely and memory-mapped."""

    def __init__(self, config: DataSource, *, skips_bad: bool = False) -> None:
        name, subset, text_key = _hub_name(config)
        try:
            table = datasets.load_dataset(name, subset or None, split="train")
        except Exception as error:  # datasets raises its own and the network's errors
            raise ValueError(f"data.path: cannot load {name} (train): {error}") from error
        problem = _column_error(table, text_key, name, skips_bad=skips_bad)
        if problem:
            raise ValueError(f"data.text_key: {problem}")
        self._column = table.data[text_key]
        self.name, self._key = f"{name}/{subset}/{text_key}", name

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, index: int) -> str | None:
        return self._column[index].as_py()

    @property
    def split_hashes(self) -> np.ndarray:
        return record_hashes(self._key, len(self))


class HubStream:
    """Streams one split of a hub dataset in its stored order, the same every epoch.

    Each row of the batch reads its own files. If there are fewer files than rows, rows that share
    files alternate. Resume re-reads and discards all documents before the row's position.
    """

    n_documents = None

    def __init__(
        self,
        name: str,
        subset: str,
        split: str,
        text_key: str,
        *,
        repeat: bool = True,
        skips_bad: bool = False,
    ) -> None:
        self._text_key, self._repeat, self._skips_bad = text_key, repeat, skips_bad
        self.description = f"{name} {subset} ({split}), streamed"
        parts = f"{name}/{subset}/{split}/{text_key}" + ("" if repeat else "/once")
        self.fingerprint = hashlib.sha256(parts.encode()).hexdigest()
        try:
            self._dataset = datasets.load_dataset(name, subset or None, split=split, streaming=True)
        except Exception as error:  # datasets raises its own and the network's errors
            raise ValueError(f"data.path: cannot open {name} ({split}): {error}") from error

    def documents(self, row: int, n_rows: int, start: int) -> Iterator[str | None]:
        n_shards = min(n_rows, self._dataset.num_shards)
        index, turn = row % n_shards, row // n_shards
        n_turns = len(range(index, n_rows, n_shards))
        shard = self._dataset.shard(n_shards, index)
        number = 0
        while True:
            first = number
            for record in self._read(islice(shard, turn, None, n_turns), row, number):
                text = record.get(self._text_key)
                if number >= start and (isinstance(text, str) or self._skips_bad):
                    yield text if isinstance(text, str) else None
                elif number >= start:
                    where = f"{self._text_key!r} of document {number} of row {row}"
                    raise ValueError(f"data.text_key: {where} is {text!r}, not text")
                number += 1
            if number == first and self._repeat:
                raise ValueError(
                    f"data.path: {self.description}: no document for row {row} of {n_rows}"
                )
            if not self._repeat:
                return

    def _read(
        self, records: Iterator[dict[str, Any]], row: int, number: int
    ) -> Iterator[dict[str, Any]]:
        """Add the document to errors: ``ValueError`` for bad contents, else ``OSError``."""
        try:
            for record in records:
                yield record
                number += 1
        except Exception as error:  # datasets raises its own, pyarrow's and the network's errors
            kind = ValueError if isinstance(error, ValueError) else OSError
            where = f"{self.description}: document {number} of row {row}"
            raise kind(f"data.path: {where} cannot be read: {error!r}") from error


def hub_streams(
    config: DataSource, with_held_out: bool, *, skips_bad: bool
) -> tuple[HubStream, HubStream | None]:
    """Open the splits "train" and, if ``with_held_out``, "validation" of a hub dataset."""
    name, subset, text_key = _hub_name(config)
    build = partial(HubStream, name, subset, text_key=text_key, skips_bad=skips_bad)
    train = build("train", repeat=config.repeat)
    held_out = build("validation") if with_held_out else None
    return train, held_out


def _hub_name(config: DataSource) -> tuple[str, str, str]:
    """(dataset, configuration, text column) of ``config``."""
    return C4 if config.type == "c4" else (config.path, config.subset, config.text_key)


def _is_json(path: Path) -> bool:
    return path.name.endswith((".jsonl", *COMPRESSED))


def _is_parquet(path: Path) -> bool:
    return path.suffix == ".parquet"


def _read_table(path: Path, text_key: str, skips_bad: bool) -> datasets.Dataset:
    """Read a table and check its text column; with ``skips_bad``, bad texts are null."""
    if path.stat().st_size == 0:
        raise ValueError(f"data.path: {path} is empty")
    is_json = _is_json(path)
    try:
        if is_json:
            table = _read_lines(path, text_key, skips_bad)
        else:
            table = datasets.Dataset.from_parquet(str(path))
    except Exception as error:  # datasets raises its own and pyarrow's errors
        line = _first_bad_line(path, text_key, skips_bad) if is_json else ""
        raise ValueError(line or f"{path}: {error.__cause__ or error!r}") from error
    problem = _column_error(table, text_key, str(path), skips_bad=skips_bad)
    if problem:
        raise ValueError(f"data.text_key: {problem}")
    return table


def _column_error(table: datasets.Dataset, text_key: str, name: str, *, skips_bad: bool) -> str:
    """Error if the column is not all text (with ``skips_bad``, text or null), else ""."""
    if text_key not in table.column_names:
        return f"{name} has no column {text_key!r}, only {', '.join(table.column_names)}"
    dtype = getattr(table.features[text_key], "dtype", "nested")
    if dtype not in ("string", "large_string"):
        return f"{text_key!r} of {name} is {dtype}, not text"
    empty = table.data[text_key].is_null().index(True).as_py()
    if empty >= 0 and not skips_bad:
        return f"{text_key!r} of {name}, row {empty}, is null"
    return ""


def _read_lines(path: Path, text_key: str, skips_bad: bool) -> datasets.Dataset:
    """Read one row per nonblank line; with ``skips_bad``, bad lines become null.

    pyarrow's JSON reader guesses types: it turns texts that look like dates into dates.
    """
    status = path.stat()
    # datasets finds an earlier conversion in its cache by these.
    cache_keys = {"path": str(path.resolve()), "text_key": text_key, "skips_bad": skips_bad}
    cache_keys |= {"size": status.st_size, "time": status.st_mtime_ns}
    features = datasets.Features({text_key: datasets.Value("large_string")})
    return datasets.Dataset.from_generator(_texts, features=features, gen_kwargs=cache_keys)


def _texts(
    path: str, text_key: str, skips_bad: bool, **cache_keys: int
) -> Iterator[dict[str, str | None]]:
    for line in _lines(Path(path)):
        text, problem = _text_of(line, text_key)
        if problem and not skips_bad:
            raise ValueError(problem)
        if line.strip():
            yield {text_key: text}


def _lines(path: Path) -> Iterator[bytes]:
    """Lines of the file, decompressed; ``OSError`` if a compressed file is truncated or corrupt."""
    try:
        if path.suffix == ".zst":
            yield from _split(_decompressed(path))
        else:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
                yield from file
    except (EOFError, zlib.error) as error:
        raise OSError(f"truncated or corrupt: {error}") from error


def _decompressed(path: Path) -> Iterator[bytes]:
    # Imported here, because only .zst files need the package.
    import zstandard

    decompressor = zstandard.ZstdDecompressor().decompressobj()
    is_in_frame = False
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            while chunk:
                try:
                    yield decompressor.decompress(chunk)
                except zstandard.ZstdError as error:
                    raise OSError(f"truncated or corrupt: {error}") from error
                is_in_frame, chunk = not decompressor.eof, decompressor.unused_data
                if decompressor.eof:
                    decompressor = zstandard.ZstdDecompressor().decompressobj()
    if is_in_frame:
        # zstandard does not report this itself.
        raise OSError("truncated or corrupt: ends within a frame")


def _split(chunks: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line + b"\n" for line in lines)
    if rest:
        yield rest


def _first_bad_line(path: Path, text_key: str, skips_bad: bool) -> str:
    """Error of the first bad line of JSON, "" if there is none.

    With ``skips_bad`` only truncated or corrupt files and those of only blank lines are errors.
    """
    start, is_blank = 0, True
    try:
        for number, line in enumerate(_lines(path), start=1):
            problem = "" if skips_bad else _text_of(line, text_key)[1]
            if problem:
                return f"{path}, line {number}, byte {start}: {problem}"
            start += len(line)
            is_blank = is_blank and not line.strip()
    except (OSError, ImportError) as error:
        return f"{path}, after byte {start} of its text: {error}"
    return f"{path} has only blank lines" if is_blank else ""


def _text_of(line: bytes, text_key: str) -> tuple[str | None, str]:
    """(text of a line of JSON, ""), ("", "") if it is blank, or (None, error)."""
    if not line.strip():
        return "", ""
    try:
        record = json.loads(line.decode("utf-8-sig"))
        if not isinstance(record, dict):
            return None, f"{reprlib.repr(record)} is not an object"
        if text_key not in record:
            return None, f"data.text_key: no {text_key!r}, only {shorten(', '.join(record), 200)}"
        text = record[text_key]
        if not isinstance(text, str):
            return None, f"data.text_key: {text_key!r} is {reprlib.repr(text)}, not text"
        # JSON can escape a lone surrogate, which UTF-8 cannot encode.
        text.encode()
    except json.JSONDecodeError as error:
        return None, f"{error.msg}, column {error.colno}"
    except (ValueError, RecursionError) as error:
        return None, str(error)
    return text, ""
