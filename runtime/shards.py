"""Which part of a sharded tensor a rank holds."""

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch.distributed.tensor import DTensor, Placement, Shard

from runtime.compat import find


def part_of(tensor: torch.Tensor, coordinate: Sequence[int]) -> tuple[slice, ...]:
    """Per dim of ``tensor``, the slice that the rank at ``coordinate`` of its mesh holds.

    That is all of a tensor that is not distributed.
    """
    held = [slice(0, size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        # A strided shard was cut after the plain shards that stand to its right.
        order = sorted(range(mesh.ndim), key=lambda d: is_strided(placements[d]))
        for mesh_dim in order:
            placement = placements[mesh_dim]
            if is_sharded(placement):
                whole = held[placement.dim]
                size = -(-(whole.stop - whole.start) // mesh.size(mesh_dim))
                start = min(whole.stop, whole.start + coordinate[mesh_dim] * size)
                held[placement.dim] = slice(start, min(whole.stop, start + size))
    return tuple(held)


def is_sharded(placement: Placement) -> TypeGuard[Shard]:
    """Whether ranks hold parts."""
    return isinstance(placement, Shard) or is_strided(placement)


def is_strided(placement: Placement) -> bool:
    """Whether FSDP cut here a dim that tensor parallel had cut before."""
    strided = find("torch.distributed.tensor.placement_types:_StridedShard")
    return strided is not None and isinstance(placement, strided)
