"""JSON index of a checkpoint's tensors: their shards, and the places of those in files.

Imports no torch.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from checkpoint.hashed_file import read_checked, write_hashed
from runtime.filesystem import read_file

TENSOR_INDEX_FILE = "tensors.json"
# 405B in 4,096 shards takes 1.2 GB.
MAX_BYTES = 1 << 34
# Bytes of an element, by the name of its torch.dtype.
ITEM_SIZES = {
    **{"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2},
    **{"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1},
}


class TensorShard(NamedTuple):
    """A contiguous, row-major box of a tensor, and its place in a file."""

    file: str
    file_offset: int
    """In bytes."""
    offsets: list[int]
    sizes: list[int]


@dataclass(frozen=True)
class TensorRecord:
    """A tensor of the checkpoint: its shards tile it."""

    dtype: str
    shape: list[int]
    shards: list[TensorShard]


@dataclass(frozen=True)
class FileLayout:
    """Size in bytes and shards of a file that is to be written."""

    name: str
    size: int
    records: dict[str, TensorRecord]


def index_content(files: Iterable[FileLayout]) -> bytes:
    """Content of the tensor index of ``files``; raise ``ValueError`` as ``read_index`` does."""
    index: dict[str, dict[str, Any]] = {}
    sizes = {}
    for layout in files:
        sizes[layout.name] = layout.size
        for fqn, record in layout.records.items():
            merged = {"dtype": record.dtype, "shape": record.shape, "parts": []}
            index.setdefault(fqn, merged)["parts"] += [_to_json(shard) for shard in record.shards]
    content = json.dumps(index).encode()
    _parse_index(content, sizes)
    return content


def write_index(folder: Path, content: bytes) -> dict[str, dict[str, Any]]:
    """Write and fsync the tensor index; return its size and hash by its name."""
    return {TENSOR_INDEX_FILE: write_hashed(folder / TENSOR_INDEX_FILE, content)}


def read_index(folder: Path, sizes: Mapping[str, int]) -> dict[str, TensorRecord]:
    """Read the tensor index; ``sizes`` has the size in bytes of each file.

    Raises ``ValueError`` if it is malformed, if a shard lies outside its file or its tensor, or if
    the shards do not add up to the tensor. Raises ``OSError`` as ``read_checked`` does.
    """
    path = folder / TENSOR_INDEX_FILE
    try:
        return _parse_index(read_checked(lambda: read_file(path, MAX_BYTES)), sizes)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _parse_index(content: bytes, sizes: Mapping[str, int]) -> dict[str, TensorRecord]:
    try:
        index = json.loads(content)
        # Popped, because the objects of millions of shards take gigabytes.
        return {fqn: _parse(fqn, index.pop(fqn), sizes) for fqn in list(index.keys())}
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _to_json(shard: TensorShard) -> dict[str, Any]:
    # No ``asdict``, which takes 50 times as long: 405B on 4,096 ranks has millions of shards.
    return {
        "start": shard.file_offset,
        "file": shard.file,
        "offsets": shard.offsets,
        "sizes": shard.sizes,
    }


def _parse(fqn: str, fields: dict[str, Any], sizes: Mapping[str, int]) -> TensorRecord:
    shards = [TensorShard(file_offset=part.pop("start"), **part) for part in fields["parts"]]
    record = TensorRecord(fields["dtype"], fields["shape"], shards)
    itemsize = ITEM_SIZES[record.dtype]
    total = 0
    numbers = [*record.shape, *(n for s in shards for n in (s.file_offset, *s.offsets, *s.sizes))]
    if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise ValueError(f"{fqn}: shape, start, offsets and sizes must be integers >= 0, < 2**63")
    for shard in shards:
        boxes = zip(record.shape, shard.offsets, shard.sizes, strict=True)
        if not all(offset + size <= n for n, offset, size in boxes):
            raise ValueError(f"{fqn}: a shard lies outside the tensor")
        count = math.prod(shard.sizes)
        end = shard.file_offset + count * itemsize
        if shard.file_offset % itemsize or end > sizes[shard.file]:
            raise ValueError(f"{fqn}: a shard is misaligned or lies outside {shard.file}")
        total += count
    if total != math.prod(record.shape):
        raise ValueError(f"{fqn}: the shards do not add up to the tensor")
    return record
