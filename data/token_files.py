"""Documents that were tokenized before, memory-mapped: what tools.prepare or Megatron-LM wrote.

A prepared folder has ``index.json`` and shards: ``shard-00000.bin`` has the ids of its documents
one after the other, each complete (bos, ids, eos), ``shard-00000.ends`` where each of them ends.
"""

import glob
import hashlib
import json
import os
import re
import struct
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from data.files import FINGERPRINTED, locate, named, record_keys, spread

INDEX_FILE = "index.json"
BEGUN_FILE = "begun.json"
FORMAT = 1
DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("uint8", "uint16", "uint32")}
ENDS_DTYPE = np.dtype("<i8")
SHARD_FILE = re.compile(r"shard-\d{5,}\.bin")

MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
# Magic, version, code of the dtype, number of sequences, number of document indices.
MEGATRON_HEADER = struct.Struct("<9sQBQQ")
MEGATRON_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}

# Each takes two file descriptors, and a process may often have no more than 1024.
MAPPED_PARTS = 256

# A document's number in a part, to the place of its first id and that after its last.
Bounds = Callable[[int], tuple[int, int]]


class Part(NamedTuple):
    """A file of ids, and how to find where in it each document is."""

    name: str
    path: Path
    dtype: np.dtype
    n_documents: int
    fingerprint: str
    """A hash of the contents, if there is one; else one of their size and a few documents."""
    map_bounds: Callable[[], Bounds]


class TokenFiles:
    """Documents of ids. The files used last are memory-mapped; only what is read takes memory."""

    def __init__(
        self, parts: list[Part], *, tokenizer_fingerprint: str | None, max_id: int | None
    ) -> None:
        self._parts = parts
        self._ends = list(accumulate(part.n_documents for part in parts))
        self.tokenizer_fingerprint = tokenizer_fingerprint
        """As in ``Tokenizer``; None: the files do not say."""
        self.max_id = max_id
        """The largest id there is; None: the files do not say."""
        self._mapped = lru_cache(maxsize=MAPPED_PARTS)(self._map)
        lines = "\n".join(f"{part.name} {part.fingerprint}" for part in parts)
        self.fingerprint = hashlib.sha256(lines.encode()).hexdigest()
        """Equal for files that give equal documents in equal order."""

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> np.ndarray:
        """The ids (s,) of a document, a view of the file; ``ValueError`` if its bounds are bad."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        number, document = locate(self._ends, index)
        ids, bounds = self._mapped(number)
        start, end = bounds(document)
        return ids[start:end]

    @property
    def keys(self) -> np.ndarray:
        """For each document, a uniform uint64 that depends only on its file's name and its number.

        Computed at every call, not kept: there is one for each document.
        """
        keys = np.empty(len(self), np.uint64)
        for part, end in zip(self._parts, self._ends, strict=True):
            keys[end - part.n_documents : end] = record_keys(part.name, part.n_documents)
        return keys

    def _map(self, number: int) -> tuple[np.ndarray, Bounds]:
        part = self._parts[number]
        # A file that does not open is no mistake in the data: a restart may help.
        try:
            return _map_file(part.path, part.dtype), part.map_bounds()
        except ValueError as error:
            if isinstance(error.__cause__, OSError):
                raise OSError(str(error)) from error
            raise


def open_token_files(path: str) -> TokenFiles:
    """Open a folder of tools.prepare, an .idx file of Megatron-LM, or all such that a glob finds.

    Raises ``ValueError`` for what is missing or not as long as it should be; contents are not read.
    """
    parts: list[Part] = []
    tokenizers: dict[str, Path] = {}
    max_ids: list[int | None] = []
    for place, name in _matching(path):
        if place.suffix == ".idx":
            parts.append(_megatron_part(place, name))
            max_ids.append(None)
            continue
        index = read_index(place)
        parts += _prepared_parts(place, name, index)
        tokenizers.setdefault(index["tokenizer"]["fingerprint"], place)
        max_ids += [shard["max_id"] for shard in index["shards"] if shard["documents"]]
    if len(tokenizers) > 1:
        first, second = list(tokenizers.values())[:2]
        raise ValueError(f"data.path: {first} and {second} are of different tokenizers")
    if not any(part.n_documents for part in parts):
        raise ValueError(f"data.path: {path} has no documents")
    known = [max_id for max_id in max_ids if max_id is not None]
    return TokenFiles(
        parts,
        tokenizer_fingerprint=next(iter(tokenizers), None),
        max_id=max(known) if len(known) == len(max_ids) else None,
    )


def _matching(path: str) -> list[tuple[Path, str]]:
    """(path, name) of folders and .idx files; the name does not depend on where they all lie."""
    if path and os.path.exists(path):
        places = [(Path(path), "" if os.path.isdir(path) else Path(path).name)]
    else:
        found = [Path(place) for place in sorted(glob.glob(path, recursive=True))]
        # A glob may find both files of Megatron-LM: a .bin beside an .idx belongs to it.
        found = [p for p in found if p.suffix != ".bin" or not p.with_suffix(".idx").exists()]
        places = named(path, found)
    if not places:
        raise ValueError(f"data.path: no folder and no .idx file matches {path!r}")
    for place, _ in places:
        if place.suffix != ".idx" and not place.is_dir():
            text = f"{place} is neither a folder of tools.prepare nor an .idx file"
            raise ValueError(f"data.path: {text}")
    return places


def read_index(folder: Path) -> dict[str, Any]:
    """What ``index.json`` says; raise ``ValueError`` if it is not what was written."""
    path = folder / INDEX_FILE
    try:
        index = json.loads(path.read_bytes())
        version, checksum = index["format"], index.pop("checksum")
    except FileNotFoundError:
        begun = (folder / BEGUN_FILE).exists()
        hint = "; tools.prepare is not done with it" if begun else ""
        raise ValueError(f"data.path: {folder} has no {INDEX_FILE}{hint}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"data.path: {path}: not an index: {error!r}") from None
    if version != FORMAT:
        raise ValueError(f"data.path: {path}: its format is {version!r}, not {FORMAT}")
    if checksum != _checksum(index):
        raise ValueError(f"data.path: {path}: contents are not what was written")
    if index["dtype"] not in DTYPES:
        known = ", ".join(DTYPES)
        raise ValueError(f"data.path: {path}: its dtype is {index['dtype']!r}, not one of {known}")
    for shard in index["shards"]:
        if not SHARD_FILE.fullmatch(shard["file"]):
            raise ValueError(f"data.path: {path}: {shard['file']!r} is not the name of a shard")
    return index


def index_text(index: dict[str, Any]) -> bytes:
    """The contents of ``index.json``, which ``read_index`` reads."""
    return json.dumps({**index, "checksum": _checksum(index)}, indent=1).encode()


def _checksum(index: dict[str, Any]) -> str:
    """The index lists all hashes but its own; this is that one."""
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


def dtype_of(n_vocab: int) -> str:
    """The smallest dtype that holds all ids below ``n_vocab``."""
    return next(name for name, dtype in DTYPES.items() if n_vocab - 1 <= np.iinfo(dtype).max)


def check_sizes(folder: Path, shard: dict[str, Any], dtype: np.dtype) -> None:
    """Raise ``ValueError`` if a file of a shard is missing, or not as long as its facts say."""
    path = folder / shard["file"]
    _check_size(path, shard["tokens"] * dtype.itemsize)
    _check_size(path.with_suffix(".ends"), shard["documents"] * ENDS_DTYPE.itemsize)


def verify(folder: Path) -> Iterator[tuple[Path, str]]:
    """Hash the files of a prepared folder, one by one: the path, and what is wrong, "" if nothing.

    Raises ``ValueError`` if there is no index to compare with.
    """
    index = read_index(folder)
    for shard in index["shards"]:
        path = folder / shard["file"]
        hashes = {path: shard["sha256"], path.with_suffix(".ends"): shard["ends_sha256"]}
        for file, expected in hashes.items():
            try:
                with file.open("rb") as content:
                    actual = hashlib.file_digest(content, "sha256").hexdigest()
                yield file, "" if actual == expected else "contents are not what was written"
            except OSError as error:
                yield file, error.strerror or str(error)


def _prepared_parts(folder: Path, name: str, index: dict[str, Any]) -> Iterator[Part]:
    dtype = DTYPES[index["dtype"]]
    for shard in index["shards"]:
        check_sizes(folder, shard, dtype)
        path, n_tokens = folder / shard["file"], shard["tokens"]
        ends_path = path.with_suffix(".ends")
        # The first and the last end are checked now, the others as they are used.
        _prepared_bounds(ends_path, n_tokens)
        yield Part(
            name=PurePosixPath(name, path.stem).as_posix(),
            path=path,
            dtype=dtype,
            n_documents=shard["documents"],
            fingerprint=f"{index['dtype']} {shard['sha256']} {shard['ends_sha256']}",
            map_bounds=partial(_prepared_bounds, ends_path, n_tokens),
        )


def _prepared_bounds(path: Path, n_tokens: int) -> Bounds:
    ends = _map_file(path, ENDS_DTYPE)
    if len(ends) and (not 0 < ends[0] <= ends[-1] or ends[-1] != n_tokens):
        where = f"data.path: {path}, bytes 0 and {ends.nbytes - ENDS_DTYPE.itemsize}"
        text = f"documents end at {ends[0]} and {ends[-1]}, the last of {n_tokens} tokens"
        raise ValueError(f"{where}: {text}")

    def bounds(document: int) -> tuple[int, int]:
        start = int(ends[document - 1]) if document else 0
        end = int(ends[document])
        if not 0 <= start < end <= n_tokens:
            where = f"{path}, byte {document * ENDS_DTYPE.itemsize}: document {document}"
            raise ValueError(f"data.path: {where} is from {start} to {end} of {n_tokens} tokens")
        return start, end

    return bounds


def _megatron_part(path: Path, name: str) -> Part:
    try:
        with path.open("rb") as file:
            header = file.read(MEGATRON_HEADER.size)
    except OSError as error:
        raise ValueError(f"data.path: {path}: {error.strerror}") from None
    if len(header) < MEGATRON_HEADER.size or not header.startswith(MEGATRON_MAGIC):
        raise ValueError(f"data.path: {path}: not an index of Megatron-LM (MMIDIDX)")
    _, version, code, n_sequences, n_indices = MEGATRON_HEADER.unpack(header)
    if version != 1:
        raise ValueError(f"data.path: {path}: its version is {version}, not 1")
    if code not in MEGATRON_DTYPES:
        raise ValueError(f"data.path: {path}: its dtype has code {code}: not whole numbers")
    _check_size(path, MEGATRON_HEADER.size + 12 * n_sequences + 8 * n_indices)
    dtype = np.dtype(MEGATRON_DTYPES[code]).newbyteorder("<")
    lengths, pointers, indices = _megatron_arrays(path, n_sequences)
    if n_indices == 0 or indices[0] != 0 or indices[-1] != n_sequences:
        raise ValueError(f"data.path: {path}: its documents are not all {n_sequences} sequences")
    n_bytes = int(pointers[-1]) + int(lengths[-1]) * dtype.itemsize if n_sequences else 0
    ids_path = path.with_suffix(".bin")
    _check_size(ids_path, n_bytes)
    part = Part(
        name=name,
        path=ids_path,
        dtype=dtype,
        n_documents=n_indices - 1,
        fingerprint=f"{dtype.name} {n_indices} {n_sequences} {n_bytes}",
        map_bounds=partial(_megatron_bounds, path, n_sequences, dtype.itemsize, n_bytes),
    )
    return part._replace(fingerprint=f"{part.fingerprint} {_sample(part)}")


def _megatron_arrays(path: Path, n_sequences: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each sequence's number of ids and first byte; each document's first sequence."""
    raw = _map_file(path, np.dtype(np.uint8))
    lengths = MEGATRON_HEADER.size
    pointers = lengths + 4 * n_sequences
    indices = pointers + 8 * n_sequences
    return (
        raw[lengths:pointers].view("<i4"),
        raw[pointers:indices].view("<i8"),
        raw[indices:].view("<i8"),
    )


def _megatron_bounds(path: Path, n_sequences: int, itemsize: int, n_bytes: int) -> Bounds:
    lengths, pointers, indices = _megatron_arrays(path, n_sequences)

    def bounds(document: int) -> tuple[int, int]:
        first, last = int(indices[document]), int(indices[document + 1])
        if first == last:
            return 0, 0
        where = f"data.path: {path}: document {document}"
        if not 0 <= first < last <= n_sequences:
            raise ValueError(f"{where} has sequences {first} to {last} of {n_sequences}")
        start, size = int(pointers[first]), int(lengths[first:last].sum()) * itemsize
        end = int(pointers[last - 1]) + int(lengths[last - 1]) * itemsize
        if not 0 <= start <= end <= n_bytes or start % itemsize or end - start != size:
            raise ValueError(f"{where} is from byte {start} to {end} of {n_bytes}, and has {size}")
        return start // itemsize, end // itemsize

    return bounds


def _sample(part: Part) -> str:
    """Hash of the beginnings of a few documents spread over the file."""
    digest = hashlib.sha256()
    ids, bounds = _map_file(part.path, part.dtype), part.map_bounds()
    for document in spread(part.n_documents, FINGERPRINTED):
        start, end = bounds(document)
        digest.update(b"%d %d " % (start, end) + ids[start : min(end, start + 4096)].tobytes())
    return digest.hexdigest()


def _check_size(path: Path, size: int) -> None:
    try:
        actual = path.stat().st_size
    except OSError as error:
        raise ValueError(f"data.path: {path}: {error.strerror}") from None
    if actual != size:
        raise ValueError(f"data.path: {path} has {actual} bytes, not {size}")


def _map_file(path: Path, dtype: np.dtype) -> np.ndarray:
    """The file's contents, read-only; ``ValueError`` if it is not there any more."""
    try:
        if path.stat().st_size == 0:
            # An empty file cannot be mapped.
            return np.empty(0, dtype)
        # A view, because slices of np.memmap itself are slow.
        return np.memmap(path, dtype, mode="r").view(np.ndarray)
    except (OSError, ValueError) as error:
        raise ValueError(f"data.path: {path}: {error}") from error
