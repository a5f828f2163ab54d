"""Helpers for the local shard of a DTensor."""

from collections.abc import Sequence
from typing import TypeGuard

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement, Shard

from runtime.compat import find


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a DTensor, or any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_slices(tensor: torch.Tensor, coordinate: Sequence[int]) -> tuple[slice, ...]:
    """Global slice, per dim, of the shard on the rank at mesh ``coordinate``.

    Like PyTorch's ``compute_local_shape_and_global_offset``. A plain tensor is one whole slice.
    """
    slices = [slice(0, size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        # A strided shard is split after the plain shards to its right.
        order = sorted(range(mesh.ndim), key=lambda d: is_strided(placements[d]))
        for mesh_dim in order:
            placement = placements[mesh_dim]
            if is_sharded(placement):
                full = slices[placement.dim]
                size = -(-(full.stop - full.start) // mesh.size(mesh_dim))
                start = min(full.stop, full.start + coordinate[mesh_dim] * size)
                slices[placement.dim] = slice(start, min(full.stop, start + size))
    return tuple(slices)


def sharding_groups(tensor: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Process groups over which ``tensor`` is sharded; a plain tensor has none."""
    if not isinstance(tensor, DTensor):
        return ()
    for placement in tensor.placements:
        assert not placement.is_partial(), "a tensor is still Partial"
    return tuple(
        tensor.device_mesh.get_group(dim)
        for dim, placement in enumerate(tensor.placements)
        if is_sharded(placement)
    )


def is_sharded(placement: Placement) -> TypeGuard[Shard]:
    """True if ``placement`` is ``Shard`` or ``_StridedShard``."""
    return isinstance(placement, Shard) or is_strided(placement)


def is_strided(placement: Placement) -> bool:
    """True if FSDP shards a dim here that tensor parallel sharded before (``_StridedShard``)."""
    strided = find("torch.distributed.tensor.placement_types:_StridedShard")
    return strided is not None and isinstance(placement, strided)
