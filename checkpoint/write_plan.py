"""Assignment of a checkpoint's shards to the ranks that write them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from checkpoint.tensor_files import lay_out, shard_bytes
from checkpoint.tensor_index import index_content
from runtime.object_collectives import gather_to_rank0, run_on_rank0

# Of a digest of 128 bits. NumPy sorts and compares it.
DIGEST = np.dtype("S16")


@dataclass(frozen=True)
class WritePlan:
    """File that this rank writes at each save, its shards, and the index of all files."""

    file: str
    items: list[WriteItem]
    index: bytes
    """On rank 0: content of the tensor index of all ranks' files. Elsewhere empty."""


def plan_writes(planner: dcp.DefaultSavePlanner) -> WritePlan:
    """Plan this rank's writes; of replicated shards, one rank writes each. Collective.

    Raises ``RankFailure`` if a state is no tensor, or if the shards of all ranks are no checkpoint
    that could be loaded. DCP plans a rank's shards. Its global plan is not used: it makes metadata
    that nobody reads, in a time that grows with the ranks squared.
    """
    items: list[WriteItem] = []

    def local_shards() -> tuple[npt.NDArray[np.bytes_], npt.NDArray[np.int64]]:
        items.extend(planner.create_local_plan().items)
        others = [item.index.fqn for item in items if item.type == WriteItemType.BYTE_IO]
        if others:
            raise ValueError(f"not a tensor, so it could not be loaded: {others[0]}")
        names = [f"{item.index.fqn} {item.index.offset}".encode() for item in items]
        digests = np.array([xxhash.xxh3_128_digest(name) for name in names], dtype=DIGEST)
        sizes = [shard_bytes(item) for item in items]
        return digests, np.array(sizes, dtype=np.int64)

    by_rank = gather_to_rank0(local_shards)
    writes: list[npt.NDArray[np.bool_]] = []
    run_on_rank0(lambda: writes.extend(assign_writes(*zip(*by_rank, strict=True))))
    mine: list[npt.NDArray[np.bool_] | None] = [None]
    dist.scatter_object_list(mine, writes or None)
    assert mine[0] is not None
    own = [item for item, is_mine in zip(items, mine[0], strict=True) if is_mine]
    file = f"rank-{dist.get_rank():05d}.bin"
    layouts = gather_to_rank0(lambda: lay_out(file, own))
    index: list[bytes] = []
    run_on_rank0(lambda: index.append(index_content(layouts)))
    return WritePlan(file, own, *(index or [b""]))


def assign_writes(
    digests: Sequence[npt.NDArray[np.bytes_]], sizes: Sequence[npt.NDArray[np.int64]]
) -> list[npt.NDArray[np.bool_]]:
    """Return which of its shards each rank writes: of equal ones one, where fewest bytes are.

    ``digests`` and ``sizes`` (bytes) are those of each rank's shards, in order.
    """
    counts = [len(own) for own in digests]
    rank_of = np.repeat(np.arange(len(counts)), counts)
    size_of = np.concatenate(sizes)
    _, group_of, n_equal = np.unique(
        np.concatenate(digests), return_inverse=True, return_counts=True
    )
    is_written = n_equal[group_of] == 1
    load = np.bincount(rank_of[is_written], size_of[is_written], minlength=len(counts))
    replicated = np.flatnonzero(~is_written)
    # The largest first, and equal shards side by side.
    replicated = replicated[np.lexsort((group_of[replicated], -size_of[replicated]))]
    begins = np.flatnonzero(np.diff(group_of[replicated], prepend=-1))
    for equal in np.split(replicated, begins[1:]):
        if len(equal):
            writer = equal[np.argmin(load[rank_of[equal]])]
            is_written[writer] = True
            load[rank_of[writer]] += size_of[writer]
    return np.split(is_written, np.cumsum(counts)[:-1])
