"""Pretokenized documents, memory-mapped: folders of shardloom prepare, or files of Megatron-LM.

A prepared folder has ``index.json`` and shards: ``shard-00000.bin`` holds the concatenated ids of
its documents with bos and eos, ``shard-00000.ends`` the end of each document.
"""

import hashlib
import json
import mmap
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from config.paths import is_url
from data.files import (
    FINGERPRINT_SAMPLES,
    TOKEN_INDEX_FILE,
    WILDCARD,
    evenly_spaced,
    find_shard,
    path_error,
    record_hashes,
    relative_names,
)
from data.matching import FileId, file_id, match_paths, once_each, without_owned
from data.remote_errors import StorageError
from data.storage import (
    DataPath,
    RemoteFile,
    copy_remote,
    for_each,
    local_path,
    open_data,
    read_data,
)
from runtime.filesystem import open_input
from runtime.machine import open_file_limit

BEGUN_FILE = "begun.json"
FORMAT = 1
DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("uint8", "uint16", "uint32")}
ENDS_DTYPE = np.dtype("<i8")
SHARD_FILE = re.compile(r"shard-\d{5,}\.bin")

MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
# Magic, version, code of the dtype, number of sequences, number of document indices.
MEGATRON_HEADER = struct.Struct("<9sQBQQ")
MEGATRON_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}

# Of a process. Linux allows it 65,530 maps, and a shard needs two.
MIN_MAPPED_SHARDS, MAX_MAPPED_SHARDS = 64, 16_384

# Maps a document's index in a shard to the (start, end) of its ids.
Bounds = Callable[[int], tuple[int, int]]


class TokenShard(NamedTuple):
    """A file of token ids, and the bounds of its documents."""

    name: str
    path: DataPath
    dtype: np.dtype
    n_ids: int
    n_documents: int
    fingerprint: str
    """Hash of the contents; for Megatron-LM, of the sizes and a few documents."""
    map_bounds: Callable[[], Bounds]


class TokenFiles:
    """Documents of token ids. Memory-maps the most recently used files."""

    def __init__(
        self, shards: list[TokenShard], *, tokenizer: dict[str, Any] | None, max_id: int | None
    ) -> None:
        self._shards = shards
        self._ends = list(accumulate(shard.n_documents for shard in shards))
        self.tokenizer = tokenizer
        """``fingerprint``, ``name``, ``bos`` and ``eos``; None if the files do not store them."""
        self.max_id = max_id
        """Largest id of all documents; None if the files do not store it."""
        lines = "\n".join(f"{shard.name} {shard.fingerprint}" for shard in shards)
        self.fingerprint = hashlib.sha256(lines.encode()).hexdigest()
        """Equal for files with the same documents in the same order."""

    groups = None

    @property
    def tokenizer_fingerprint(self) -> str | None:
        """Of ``Tokenizer``; None if the files do not store it."""
        return None if self.tokenizer is None else self.tokenizer["fingerprint"]

    @property
    def paths(self) -> list[DataPath]:
        return [shard.path for shard in self._shards]

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> np.ndarray:
        """Ids (s,) of a document, a view of the file; ``ValueError`` if its bounds are invalid."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        number, document = find_shard(self._ends, index)
        ids, bounds = _mapped()(self._shards[number])
        start, end = bounds(document)
        return ids[start:end]

    def place(self, index: int) -> str:
        number, document = find_shard(self._ends, index)
        return f"{self._shards[number].path}, document {document}"

    @property
    def split_hashes(self) -> np.ndarray:
        """Uniform uint64 per document that depends only on its file's name and its index.

        Computed at every call, because keeping one for each document would take memory.
        """
        hashes = np.empty(len(self), np.uint64)
        for shard, end in zip(self._shards, self._ends, strict=True):
            hashes[end - shard.n_documents : end] = record_hashes(shard.name, shard.n_documents)
        return hashes


@cache
def _mapped() -> Callable[[TokenShard], tuple[np.ndarray, Bounds]]:
    """Return ``_map`` with a cache for all sources, whose shards take half of the open files."""
    n_shards = open_file_limit() // 4
    return lru_cache(min(max(n_shards, MIN_MAPPED_SHARDS), MAX_MAPPED_SHARDS))(_map)


def _map(shard: TokenShard) -> tuple[np.ndarray, Bounds]:
    # A file that cannot be opened is not bad data, because a restart may help.
    try:
        ids, bounds = _map_file(shard.path, shard.dtype), shard.map_bounds()
    except ValueError as error:
        if isinstance(error.__cause__, OSError):
            raise OSError(str(error)) from error
        raise
    if len(ids) != shard.n_ids:
        text = f"data.path: {shard.path} changed from {shard.n_ids:,} to {len(ids):,} tokens"
        raise StorageError(f"{text} while it was read", is_final=True)
    return ids, bounds


def open_token_files(
    path: str, owners: Mapping[FileId, str] | None = None, label: str = ""
) -> TokenFiles:
    """Open a folder of shardloom prepare, an .idx file of Megatron-LM, or all that match a glob.

    ``owners``, ``label``: as in ``without_owned``. Copies remote files. Raises ``ValueError`` for
    missing files and wrong sizes; does not read the contents.
    """
    shards: list[TokenShard] = []
    tokenizers: dict[str, tuple[DataPath, dict[str, Any]]] = {}
    max_ids: list[int | None] = []
    for found, name in _match_paths(path):
        if found.suffix == ".idx":
            shards.append(_megatron_shard(found, name))
            max_ids.append(None)
            continue
        index = read_index(found)
        shards += _prepared_shards(found, name, index)
        tokenizers.setdefault(index["tokenizer"]["fingerprint"], (found, index["tokenizer"]))
        max_ids += [shard["max_id"] for shard in index["shards"] if shard["documents"]]
    if len(tokenizers) > 1:
        first, second = [folder for folder, _ in tokenizers.values()][:2]
        raise ValueError(f"data.path: {first} and {second} have different tokenizers")
    if not any(shard.n_documents for shard in shards):
        raise ValueError(f"data.path: {path} has no documents")
    shards = _once_each(shards, path, owners or {}, label)
    known = [max_id for max_id in max_ids if max_id is not None]
    return TokenFiles(
        shards,
        tokenizer=next((tokenizer for _, tokenizer in tokenizers.values()), None),
        max_id=max(known) if len(known) == len(max_ids) else None,
    )


def _once_each(
    shards: list[TokenShard], pattern: str, owners: Mapping[FileId, str], label: str
) -> list[TokenShard]:
    """``shards`` in their order, of which each file is read once, and by one source."""
    matches: dict[FileId, list[tuple[DataPath, str]]] = {}
    for shard in shards:
        name = PurePosixPath(shard.name).with_name(shard.path.name).as_posix()
        matches.setdefault(file_id(shard.path), []).append((shard.path, name))
    files = without_owned(once_each(matches, pattern), owners, label)
    kept = {path for path, _ in files}
    return [shard for shard in shards if shard.path in kept]


def _match_paths(path: str) -> Sequence[tuple[DataPath, str]]:
    """(path, name) of folders and .idx files; names are relative to the glob's fixed part."""
    matches: Sequence[tuple[DataPath, str]]
    if is_url(path) and not WILDCARD.search(path):
        one = RemoteFile(path, is_folder=not path.endswith(".idx"))
        matches = [(one, "" if one.is_dir() else one.name)]
    elif path and os.path.exists(path):
        matches = [(Path(path), "" if os.path.isdir(path) else Path(path).name)]
    else:
        paths = match_paths(path, folder_file=TOKEN_INDEX_FILE)
        # A glob may match both files of Megatron-LM: a .bin beside an .idx belongs to it.
        paths = [p for p in paths if p.suffix != ".bin" or not p.with_suffix(".idx").exists()]
        matches = relative_names(path, paths)
    if not matches:
        raise ValueError(f"data.path: no folder and no .idx file matches {path!r}")
    for match, _ in matches:
        if match.suffix != ".idx" and not match.is_dir():
            text = f"{match} is neither a folder of shardloom prepare nor an .idx file"
            raise ValueError(f"data.path: {text}")
    return matches


def read_index(folder: DataPath) -> dict[str, Any]:
    """Read and verify ``index.json``; raise ``ValueError`` if it is missing or corrupt."""
    path = folder / TOKEN_INDEX_FILE
    try:
        index = json.loads(read_data(path))
        version, checksum = index["format"], index.pop("checksum")
    except StorageError:
        raise
    except FileNotFoundError:
        begun = (folder / BEGUN_FILE).exists()
        hint = f"shardloom prepare {'has not finished it' if begun else 'writes it, from text'}"
        raise ValueError(f"data.path: {folder} has no {TOKEN_INDEX_FILE}; {hint}") from None
    except OSError as error:
        raise path_error(path, error) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"data.path: {path}: not an index: {error!r}") from None
    if version != FORMAT:
        raise ValueError(f"data.path: {path}: format is {version!r}, not {FORMAT}")
    if checksum != _checksum(index):
        raise ValueError(f"data.path: {path}: checksum mismatch")
    if not _has_form(index):
        text = "a key is missing, or its value has another type or range"
        raise ValueError(f"data.path: {path}: not an index: {text}")
    if index["dtype"] not in DTYPES:
        known = ", ".join(DTYPES)
        raise ValueError(f"data.path: {path}: dtype is {index['dtype']!r}, not one of {known}")
    for shard in index["shards"]:
        if not SHARD_FILE.fullmatch(shard["file"]):
            raise ValueError(f"data.path: {path}: {shard['file']!r} is not a shard's name")
    return index


def _has_form(index: dict[str, Any]) -> bool:
    """True if the index has all keys that are read, with their types and ranges."""
    try:
        shards = index["shards"]
        texts = [index["dtype"], index["tokenizer"]["fingerprint"]]
        texts += [shard[key] for shard in shards for key in ("file", "sha256", "ends_sha256")]
        counts = [shard[key] for shard in shards for key in ("documents", "tokens")]
        counts += [shard["max_id"] for shard in shards if shard["max_id"] is not None]
    except (KeyError, TypeError):
        return False
    are_counts = all(type(count) is int and 0 <= count < 2**53 for count in counts)
    return are_counts and all(isinstance(text, str) for text in texts)


def encode_index(index: dict[str, Any]) -> bytes:
    """Contents of ``index.json`` with its checksum, for ``read_index``."""
    return json.dumps({**index, "checksum": _checksum(index)}, indent=1).encode()


def _checksum(index: dict[str, Any]) -> str:
    """SHA-256 of the index, which lists those of all other files."""
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


def smallest_dtype(n_vocab: int) -> str:
    """Name of the smallest dtype that holds all ids below ``n_vocab``."""
    return next(name for name, dtype in DTYPES.items() if n_vocab - 1 <= np.iinfo(dtype).max)


def check_sizes(folder: DataPath, shard: dict[str, Any], dtype: np.dtype) -> None:
    """Raise ``ValueError`` if a file of a shard is missing or does not have its recorded size."""
    path = folder / shard["file"]
    _check_size(path, shard["tokens"] * dtype.itemsize)
    _check_size(path.with_suffix(".ends"), shard["documents"] * ENDS_DTYPE.itemsize)


def verify(folder: Path) -> Iterator[tuple[Path, str]]:
    """Hash each file of a prepared folder; yield its path and the problem, or "".

    Raises ``ValueError`` if the index is missing or corrupt.
    """
    index = read_index(folder)
    for shard in index["shards"]:
        path = folder / shard["file"]
        hashes = {path: shard["sha256"], path.with_suffix(".ends"): shard["ends_sha256"]}
        for file, expected in hashes.items():
            try:
                with open_input(file) as content:
                    actual = hashlib.file_digest(content, "sha256").hexdigest()
                yield file, "" if actual == expected else "SHA-256 mismatch"
            except OSError as error:
                yield file, error.strerror or str(error)


def _prepared_shards(folder: DataPath, name: str, index: dict[str, Any]) -> Iterator[TokenShard]:
    dtype = DTYPES[index["dtype"]]
    for_each(lambda shard: check_sizes(folder, shard, dtype), index["shards"], of=folder)
    paths = [folder / shard["file"] for shard in index["shards"]]
    copy_remote([*paths, *(path.with_suffix(".ends") for path in paths)])
    for shard in index["shards"]:
        path, n_tokens = folder / shard["file"], shard["tokens"]
        ends_path = path.with_suffix(".ends")
        # This checks the first and the last end; the others are checked on access.
        _prepared_bounds(ends_path, n_tokens)
        yield TokenShard(
            name=PurePosixPath(name, PurePosixPath(path.name).stem).as_posix(),
            path=path,
            dtype=dtype,
            n_ids=n_tokens,
            n_documents=shard["documents"],
            fingerprint=f"{index['dtype']} {shard['sha256']} {shard['ends_sha256']}",
            map_bounds=partial(_prepared_bounds, ends_path, n_tokens),
        )


def _prepared_bounds(path: DataPath, n_tokens: int) -> Bounds:
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
            raise ValueError(f"data.path: {where} spans {start} to {end} of {n_tokens} tokens")
        return start, end

    return bounds


def _megatron_shard(path: DataPath, name: str) -> TokenShard:
    try:
        with open_data(path) as file:
            header = file.read(MEGATRON_HEADER.size)
    except StorageError:
        raise
    except OSError as error:
        raise path_error(path, error) from None
    if len(header) < MEGATRON_HEADER.size or not header.startswith(MEGATRON_MAGIC):
        raise ValueError(f"data.path: {path}: not a Megatron-LM index (MMIDIDX)")
    _, version, code, n_sequences, n_indices = MEGATRON_HEADER.unpack(header)
    if version != 1:
        raise ValueError(f"data.path: {path}: version is {version}, not 1")
    if code not in MEGATRON_DTYPES:
        raise ValueError(f"data.path: {path}: dtype code {code} is not an integer type")
    _check_size(path, MEGATRON_HEADER.size + 12 * n_sequences + 8 * n_indices)
    dtype = np.dtype(MEGATRON_DTYPES[code]).newbyteorder("<")
    lengths, pointers, indices = _megatron_arrays(path, n_sequences)
    if n_indices == 0 or indices[0] != 0 or indices[-1] != n_sequences:
        raise ValueError(f"data.path: {path}: documents do not cover all {n_sequences} sequences")
    n_bytes = int(pointers[-1]) + int(lengths[-1]) * dtype.itemsize if n_sequences else 0
    ids_path = path.with_suffix(".bin")
    _check_size(ids_path, n_bytes)
    copy_remote([ids_path])
    shard = TokenShard(
        name=name,
        path=ids_path,
        dtype=dtype,
        n_ids=n_bytes // dtype.itemsize,
        n_documents=n_indices - 1,
        fingerprint=f"{dtype.name} {n_indices} {n_sequences} {n_bytes}",
        map_bounds=partial(_megatron_bounds, path, n_sequences, dtype.itemsize, n_bytes),
    )
    return shard._replace(fingerprint=f"{shard.fingerprint} {_sample_hash(shard)}")


def _megatron_arrays(path: DataPath, n_sequences: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(lengths in ids, offsets in bytes) of sequences, and first sequence of each document."""
    raw = _map_file(path, np.dtype(np.uint8))
    lengths = MEGATRON_HEADER.size
    pointers = lengths + 4 * n_sequences
    indices = pointers + 8 * n_sequences
    return (
        raw[lengths:pointers].view("<i4"),
        raw[pointers:indices].view("<i8"),
        raw[indices:].view("<i8"),
    )


def _megatron_bounds(path: DataPath, n_sequences: int, itemsize: int, n_bytes: int) -> Bounds:
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
            raise ValueError(f"{where} spans bytes {start} to {end} of {n_bytes}, but has {size}")
        return start // itemsize, end // itemsize

    return bounds


def _sample_hash(shard: TokenShard) -> str:
    """Hash of the beginnings of evenly spaced documents."""
    digest = hashlib.sha256()
    ids, bounds = _map_file(shard.path, shard.dtype), shard.map_bounds()
    for document in evenly_spaced(shard.n_documents, FINGERPRINT_SAMPLES):
        start, end = bounds(document)
        digest.update(b"%d %d " % (start, end) + ids[start : min(end, start + 4096)].tobytes())
    return digest.hexdigest()


def _check_size(path: DataPath, size: int) -> None:
    try:
        actual = path.stat().st_size
    except StorageError:
        raise
    except OSError as error:
        raise path_error(path, error) from None
    if actual != size:
        raise ValueError(f"data.path: {path} has {actual} bytes, not {size}")


def _map_file(path: DataPath, dtype: np.dtype) -> np.ndarray:
    """Memory-map the file read-only; errors as of ``path_error``."""
    local = local_path(path)
    try:
        # np.memmap takes twice the system calls, and slicing it is slow.
        descriptor = os.open(local, os.O_RDONLY | os.O_NONBLOCK)
        try:
            if os.fstat(descriptor).st_size == 0:
                # An empty file cannot be mapped.
                return np.empty(0, dtype)
            return np.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), dtype)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise path_error(path, error) from error
    except ValueError as error:
        raise ValueError(f"data.path: {path}: {error}") from error
