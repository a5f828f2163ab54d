"""Tensor files of a checkpoint: raw bytes; ``tensor_index.py`` has the index of their shards.

DCP plans what each rank writes and reads. Nothing is pickled, so reading runs no code.
"""

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, WriteItem
from torch.futures import Future

from checkpoint.hashed_file import HashedFile
from checkpoint.tensor_index import ITEM_SIZES, FileLayout, TensorRecord, TensorShard
from runtime.filesystem import open_file

# In bytes. Tensors are read in place, so they must start at multiples of their element size.
ALIGNMENT = 64
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_SIZES}


def shard_bytes(item: WriteItem) -> int:
    """Size of the shard that ``item`` writes."""
    assert item.tensor_data is not None
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def lay_out(name: str, items: Iterable[WriteItem]) -> FileLayout:
    """Places of ``items`` in the file ``name`` that ``write_tensor_file`` writes."""
    records: dict[str, TensorRecord] = {}
    size = 0
    for item in items:
        assert item.tensor_data is not None
        chunk = item.tensor_data.chunk
        size += -size % ALIGNMENT
        shard = TensorShard(name, size, list(chunk.offsets), list(chunk.sizes))
        dtype = str(item.tensor_data.properties.dtype).removeprefix("torch.")
        record = TensorRecord(dtype, list(item.tensor_data.size), [])
        records.setdefault(item.index.fqn, record).shards.append(shard)
        size += shard_bytes(item)
    return FileLayout(name, size, records)


def write_tensor_file(
    path: Path, items: Iterable[WriteItem], resolve: Callable[[WriteItem], torch.Tensor]
) -> dict[str, Any]:
    """Write one rank's items; return the file's size and hash.

    ``resolve`` returns the tensor of an item. Raises ``OSError`` if a write fails, ``ValueError``
    if a tensor has another size than its item.
    """
    with HashedFile(path) as file:
        for item in items:
            data = _bytes_of(resolve(item))
            if len(data) != shard_bytes(item):
                raise ValueError(f"{item.index.fqn}: its size changed since writes were planned")
            file.write(bytes(-file.size % ALIGNMENT))
            file.write(data)
        return file.close()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data


class Reader(dcp.StorageReader):
    """DCP ``StorageReader`` for a verified checkpoint; ``index`` comes from ``read_index``."""

    def __init__(self, folder: Path, index: dict[str, TensorRecord]) -> None:
        self._folder, self._index = folder, index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Names, shapes, dtypes and shards of all tensors, without their places in files."""
        return Metadata({fqn: _metadata(record) for fqn, record in self._index.items()})

    def set_up_storage_reader(self, metadata: Metadata, *args: Any, **kwargs: Any) -> None:
        self._shards = {
            MetadataIndex(fqn, torch.Size(shard.offsets)): (DTYPES[record.dtype], shard)
            for fqn, record in self._index.items()
            for shard in record.shards
        }

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            _, shard = self._shards[item.storage_index]
            by_file.setdefault(shard.file, []).append(item)
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
        """Read the box that ``item`` requests of its shard: only the rows that it needs."""
        dtype, shard = self._shards[item.storage_index]
        # A scalar is read as a tensor of shape (1,).
        sizes = shard.sizes or [1]
        offsets, lengths = list(item.storage_offsets) or [0], list(item.lengths) or [1]
        if math.prod(lengths) == 0:
            return torch.empty(item.lengths, dtype=dtype)
        row = math.prod(sizes[1:]) * dtype.itemsize
        data = bytearray(row * lengths[0])
        file.seek(shard.file_offset + row * offsets[0])
        if file.readinto(data) != len(data):  # type: ignore[attr-defined]
            raise OSError(f"{self._folder / shard.file}: truncated since it was verified")
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


def load_on_mesh(state: dict[str, Any], folder: Path, index: dict[str, TensorRecord]) -> None:
    """Load a verified checkpoint into ``state`` on any mesh. Collective.

    Mutates the tensors of ``state``.
    """
    # Of a large run, a tensor has thousands of shards, of which a rank reads a few.
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(state)
    chunks = defaultdict(list)
    for item in planner.create_local_plan().items:
        assert item.tensor_data is not None
        chunks[item.index.fqn].append(item.tensor_data.chunk)
    needed = {
        fqn: replace(record, shards=[s for s in record.shards if _overlaps(s, chunks[fqn])])
        for fqn, record in index.items()
    }
    dcp.load(state, storage_reader=Reader(folder, needed))


def _overlaps(shard: TensorShard, chunks: list[ChunkStorageMetadata]) -> bool:
    return any(
        all(
            mine < offset + size and offset < mine + length
            for offset, size, mine, length in zip(
                shard.offsets, shard.sizes, chunk.offsets, chunk.sizes, strict=True
            )
        )
        for chunk in chunks
    )


def load_single_process(
    state: dict[str, Any], folder: Path, index: dict[str, TensorRecord]
) -> None:
    """Load a verified checkpoint into ``state`` in one process, without a process group.

    Mutates the tensors of ``state``.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, storage_reader=Reader(folder, index), no_dist=True)


def _metadata(record: TensorRecord) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(s.offsets), torch.Size(s.sizes)) for s in record.shards
    ]
    properties = TensorProperties(dtype=DTYPES[record.dtype])
    return TensorStorageMetadata(properties, torch.Size(record.shape), chunks)
