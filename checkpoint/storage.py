"""A checkpoint's tensors as files: raw bytes, and a JSON index of where each tensor's parts are.

DCP plans who writes and who reads what. Nothing here is a pickle: reading runs no code.
"""

import json
import math
import os
import stat
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, WriteItem
from torch.futures import Future

INDEX_FILE = "tensors.json"
# Tensors are read in place, and a processor wants them at multiples of their element's size.
ALIGNMENT = 64
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


@dataclass(frozen=True)
class Part:
    """A box of a tensor and where its bytes are, row-major."""

    file: str
    start: int
    """In bytes."""
    offsets: list[int]
    sizes: list[int]


@dataclass(frozen=True)
class Entry:
    """A tensor of the checkpoint: parts that tile it."""

    dtype: str
    shape: list[int]
    parts: list[Part]


class HashedFile:
    """A new file that hashes what is written to it: from memory, not as the disk returns it."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("xb")
        self._digest = xxhash.xxh3_128()
        self.size = 0

    def write(self, data: bytes | memoryview) -> None:
        self._digest.update(data)
        self._file.write(data)
        self.size += len(data)

    def close(self) -> dict[str, Any]:
        """Make it survive a power cut; return its size in bytes and its hash."""
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        return {"size": self.size, "xxh3_128": self._digest.hexdigest()}


def write_parts(
    path: Path, items: Iterable[WriteItem], resolve: Callable[[WriteItem], torch.Tensor]
) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Write one rank's items; return the file's description, and each tensor's parts in it.

    ``OSError`` if anything could not be written.
    """
    file = HashedFile(path)
    entries: dict[str, Entry] = {}
    for item in items:
        assert item.tensor_data is not None
        chunk = item.tensor_data.chunk
        file.write(bytes(-file.size % ALIGNMENT))
        part = Part(path.name, file.size, list(chunk.offsets), list(chunk.sizes))
        dtype = str(item.tensor_data.properties.dtype).removeprefix("torch.")
        entry = Entry(dtype, list(item.tensor_data.size), [])
        entries.setdefault(item.index.fqn, entry).parts.append(part)
        file.write(_bytes_of(resolve(item)))
    return file.close(), entries


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data


def write_index(path: Path, written: Iterable[Mapping[str, Entry]]) -> dict[str, Any]:
    """Write what all ranks wrote as one index; return the file's description."""
    index: dict[str, dict[str, Any]] = {}
    for entries in written:
        for fqn, entry in entries.items():
            record = asdict(entry)
            index.setdefault(fqn, record | {"parts": []})["parts"] += record["parts"]
    file = HashedFile(path)
    file.write(json.dumps(index).encode())
    return file.close()


def read_index(folder: Path, sizes: Mapping[str, int]) -> dict[str, Entry]:
    """The tensors of a checkpoint, given its files' sizes.

    Raises ``ValueError`` for what cannot be read: parts outside their file or their tensor, or that
    do not add up to it.
    """
    path = folder / INDEX_FILE
    try:
        index = json.loads(read_file(path))
        return {fqn: _entry(fqn, record, sizes) for fqn, record in index.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None


def _entry(fqn: str, record: dict[str, Any], sizes: Mapping[str, int]) -> Entry:
    entry = Entry(record["dtype"], record["shape"], [Part(**part) for part in record["parts"]])
    itemsize = DTYPES[entry.dtype].itemsize
    total = 0
    numbers = [*entry.shape, *(n for p in entry.parts for n in (p.start, *p.offsets, *p.sizes))]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{fqn}: its places are not whole numbers")
    for part in entry.parts:
        boxes = zip(entry.shape, part.offsets, part.sizes, strict=True)
        if not all(offset + size <= n for n, offset, size in boxes):
            raise ValueError(f"{fqn}: a part is outside of the tensor")
        count = math.prod(part.sizes)
        end = part.start + count * itemsize
        if part.start % itemsize or end > sizes[part.file]:
            raise ValueError(f"{fqn}: a part is outside of {part.file}")
        total += count
    if total != math.prod(entry.shape):
        raise ValueError(f"{fqn}: its parts are not the whole")
    return entry


def open_file(path: Path) -> BinaryIO:
    """Open a plain file; ``OSError`` for a link, a pipe or a device, which could lead anywhere."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path}: not a plain file")
    return os.fdopen(descriptor, "rb")


def read_file(path: Path) -> bytes:
    with open_file(path) as file:
        return file.read()


def describe_file(path: Path) -> dict[str, Any]:
    """Size in bytes and hash of a file, as ``HashedFile.close`` gives them."""
    digest = xxhash.xxh3_128()
    size = 0
    with open_file(path) as file:
        while block := file.read(1 << 22):
            digest.update(block)
            size += len(block)
    return {"size": size, "xxh3_128": digest.hexdigest()}


class Reader(dcp.StorageReader):
    """DCP's way to the tensors of a checkpoint that was verified; ``index`` as from read_index."""

    def __init__(self, folder: Path, index: dict[str, Entry]) -> None:
        self._folder, self._index = folder, index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Which tensors and chunks there are, but not where."""
        return Metadata({fqn: _metadata(entry) for fqn, entry in self._index.items()})

    def set_up_storage_reader(self, metadata: Metadata, *args: Any, **kwargs: Any) -> None:
        self._parts = {
            MetadataIndex(fqn, torch.Size(part.offsets)): (DTYPES[entry.dtype], part)
            for fqn, entry in self._index.items()
            for part in entry.parts
        }

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            _, part = self._parts[item.storage_index]
            by_file.setdefault(part.file, []).append(item)
        for name, items in by_file.items():
            with open_file(self._folder / name) as file:
                for item in items:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(self._read(file, item))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, file: BinaryIO, item: ReadItem) -> torch.Tensor:
        """The box that ``item`` asks for, cut out of its part; only the rows needed are read."""
        dtype, part = self._parts[item.storage_index]
        # A scalar is read as a row of one.
        sizes = part.sizes or [1]
        offsets, lengths = list(item.storage_offsets) or [0], list(item.lengths) or [1]
        if math.prod(lengths) == 0:
            return torch.empty(item.lengths, dtype=dtype)
        row = math.prod(sizes[1:]) * dtype.itemsize
        data = bytearray(row * lengths[0])
        file.seek(part.start + row * offsets[0])
        if file.readinto(data) != len(data):  # type: ignore[attr-defined]
            raise OSError(f"{self._folder / part.file}: shorter than it was")
        box = torch.frombuffer(data, dtype=dtype).view(lengths[:1] + sizes[1:])
        for dim in range(1, len(sizes)):
            box = box.narrow(dim, offsets[dim], lengths[dim])
        return box.reshape(item.lengths)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def reset(self, checkpoint_id: Any = None) -> None:
        assert checkpoint_id is None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


def load_alone(state: dict[str, Any], folder: Path, index: dict[str, Entry]) -> None:
    """Fill the tensors of ``state`` from a verified checkpoint, in one process without ranks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, storage_reader=Reader(folder, index), no_dist=True)


def _metadata(entry: Entry) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in entry.parts]
    properties = TensorProperties(dtype=DTYPES[entry.dtype])
    return TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
