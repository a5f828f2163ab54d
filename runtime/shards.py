"""Which part of a sharded tensor a rank holds."""

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard


def part_of(tensor: torch.Tensor, coordinate: Sequence[int]) -> tuple[slice, ...]:
    """Per dim of ``tensor``, the slice that the rank at ``coordinate`` of its mesh holds.

    That is all of a tensor that is not distributed.
    """
    held = [slice(0, size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        # A _StridedShard was cut after the plain shards that stand to its right.
        order = sorted(range(mesh.ndim), key=lambda d: isinstance(placements[d], _StridedShard))
        for mesh_dim in order:
            placement = placements[mesh_dim]
            if isinstance(placement, (Shard, _StridedShard)):
                whole = held[placement.dim]
                size = -(-(whole.stop - whole.start) // mesh.size(mesh_dim))
                start = min(whole.stop, whole.start + coordinate[mesh_dim] * size)
                held[placement.dim] = slice(start, min(whole.stop, start + size))
    return tuple(held)
