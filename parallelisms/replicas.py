"""Replicas agree by construction; this proves that they do."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallelisms.materialize import canonical_fqn
from runtime.log import logger

BLOCK_ELEMENTS = 1 << 24
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def check_replicas(model: nn.Module, replicate_mesh: DeviceMesh) -> None:
    """Compare every parameter and buffer, bit for bit, along the 1-D ``replicate_mesh``.

    Raises ``RuntimeError`` that names the first one that differs. A collective.
    """
    if replicate_mesh.size() == 1:
        return
    named = [*model.named_parameters(), *model.named_buffers()]
    digests = torch.stack([_digest(tensor) for _, tensor in named])
    # The complement's maximum is the complement of the minimum: one reduction gives both.
    extremes = torch.stack([digests, ~digests])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=replicate_mesh.get_group())
    is_different = (extremes[0] != ~extremes[1]).cpu()
    if is_different.any():
        fqn = canonical_fqn(named[int(is_different.nonzero()[0])][0])
        raise RuntimeError(f"replicas differ, first in {fqn}")
    logger.info("replicas: %d agree in all %d tensors", replicate_mesh.size(), len(named))


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """An int64 that depends on every bit of this rank's part, and on their order."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    bits = local.detach().contiguous().view(-1).view(BITS[local.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    for block in bits.split(BLOCK_ELEMENTS):
        # Odd weights: a change of any one element changes the sum modulo 2^64.
        weights = 2 * torch.arange(block.numel(), device=block.device) + 1
        total = total * 1_000_003 + (block.to(torch.int64) * weights).sum()
    return total
