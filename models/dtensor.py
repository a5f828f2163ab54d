"""Local shards of DTensor weights, for modules that compute without DTensor dispatch."""

import torch
from torch.distributed.tensor import DTensor, Partial


def to_local_with_partial_grad(weight: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor; a plain tensor is returned unchanged."""
    if not isinstance(weight, DTensor):
        return weight
    # Ranks use a replicated weight for different tokens or heads, so gradients are partial sums.
    placements = [Partial() if p.is_replicate() else p for p in weight.placements]
    return weight.to_local(grad_placements=placements)
