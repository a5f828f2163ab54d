"""The global gradient norm of parameters that may live on different meshes."""

from collections import defaultdict

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard


@torch.no_grad()
def clip_grad_norm_(parameters: list[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale all gradients so that their global 2-norm is at most ``max_norm``; return the norm.

    Each gradient counts once: its local squares are summed over the mesh dims that shard it and
    not over those that replicate it. Mutates the gradients; no host synchronization.
    """
    shards: dict[tuple, list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            shards[_sharding_groups(parameter.grad)].append(_local(parameter.grad))
    squares = []
    for groups, local in shards.items():
        norms = torch.stack(torch._foreach_norm(local, 2.0))
        square = norms.square().sum()
        for group in groups:
            dist.all_reduce(square, group=group)
        squares.append(square)
    norm = torch.stack(squares).sum().sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for local in shards.values():
        torch._foreach_mul_(local, scale)
    return norm


def _sharding_groups(grad: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The process groups over which this gradient's shards are spread."""
    if not isinstance(grad, DTensor):
        return ()
    for placement in grad.placements:
        assert not placement.is_partial(), "a gradient was left unreduced"
    return tuple(
        grad.device_mesh.get_group(dim)
        for dim, placement in enumerate(grad.placements)
        if isinstance(placement, (Shard, _StridedShard))
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
