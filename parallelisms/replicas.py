"""Replicas agree by construction. This proves it, and makes those that differ agree."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallelisms.materialize import canonical_fqn
from runtime.log import logger

BLOCK_ELEMENTS = 1 << 24
BUCKET_BYTES = 250 << 20
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def check_replicas(model: nn.Module, weight_mesh: DeviceMesh) -> None:
    """Compare, bit for bit, every parameter and buffer along each dim that replicates it.

    Raises ``RuntimeError`` that names the first one that differs. A collective.
    """
    found, agreed = [], []
    for dim, copies in _replicated(model, weight_mesh):
        mesh = weight_mesh[dim]
        digests = torch.stack([_digest(local).to(mesh.device_type) for local in copies.values()])
        # The complement's maximum is the complement of the minimum: one reduction gives both.
        extremes = torch.stack([digests, ~digests])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=mesh.get_group())
        is_different = (extremes[0] != ~extremes[1]).cpu()
        if is_different.any():
            fqn = list(copies)[int(is_different.nonzero()[0])]
            found.append(f"replicas along {dim} differ, first in {fqn}")
        else:
            agreed.append(f"{len(copies)} tensors on {mesh.size()} ranks of {dim}")
    # Only now, for other ranks may see nothing and would wait in the next comparison.
    if found:
        raise RuntimeError("; ".join(found))
    if agreed:
        logger.info("replicas agree: %s", ", ".join(agreed))


@torch.no_grad()
def sync_replicas(model: nn.Module, weight_mesh: DeviceMesh) -> None:
    """Give all replicas the values of the first, in place: parameters, then buffers. A collective.

    For weights that did not come from ``materialize`` or a checkpoint but from one rank's hands:
    load them into the ranks whose coordinate on the replicating dims is 0, then call this. It is
    what ``sync_module_states`` was to ``FullyShardedDataParallel``.
    """
    for dim, copies in _replicated(model, weight_mesh):
        # Offloaded parameters are on the host, buffers are not.
        for device in ("cpu", "cuda"):
            tensors = [local for local in copies.values() if local.device.type == device]
            if tensors:
                dist._broadcast_coalesced(weight_mesh.get_group(dim), tensors, BUCKET_BYTES, 0)


def _replicated(
    model: nn.Module, weight_mesh: DeviceMesh
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Each mesh dim of several ranks, with this rank's part of what it replicates, by FQN."""
    named = {
        canonical_fqn(fqn): tensor
        for fqn, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
    for dim in weight_mesh.mesh_dim_names or ():
        # Stages hold different layers.
        if dim == "pp" or weight_mesh[dim].size() == 1:
            continue
        copies = {fqn: _local(tensor) for fqn, tensor in named.items() if _is_copy(tensor, dim)}
        if copies:
            yield dim, copies


def _is_copy(tensor: torch.Tensor, dim: str) -> bool:
    if not isinstance(tensor, DTensor):
        return True
    dims = tensor.device_mesh.mesh_dim_names or ()
    return dim not in dims or tensor.placements[dims.index(dim)].is_replicate()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _digest(local: torch.Tensor) -> torch.Tensor:
    """An int64 that depends on every bit of this rank's part, and on their order."""
    bits = local.contiguous().view(-1).view(BITS[local.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    for block in bits.split(BLOCK_ELEMENTS):
        # Odd weights: a change of any one element changes the sum modulo 2^64.
        weights = 2 * torch.arange(block.numel(), device=block.device) + 1
        total = total * 1_000_003 + (block.to(torch.int64) * weights).sum()
    return total
