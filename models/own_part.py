"""The part of a weight that a rank computes with by itself."""

import torch
from torch.distributed.tensor import DTensor, Partial


def own_part(weight: torch.Tensor) -> torch.Tensor:
    """This rank's part of a weight; all of it, if it is on one device."""
    if not isinstance(weight, DTensor):
        return weight
    # Each rank uses a replicated weight for other tokens or heads: gradients are parts of a sum.
    placements = [Partial() if p.is_replicate() else p for p in weight.placements]
    return weight.to_local(grad_placements=placements)
