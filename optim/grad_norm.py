"""The global gradient norm of parameters that may live on different meshes."""

from collections import defaultdict
from collections.abc import Collection

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from optim.exact_norm import Shards, exact_norm
from runtime.compat import foreach
from runtime.distributed import local_part
from runtime.shards import is_sharded


@torch.no_grad()
def clip_grad_norm_(
    parameters: list[nn.Parameter],
    max_norm: float,
    *,
    norms: list[torch.Tensor] | None = None,
    is_exact: bool = False,
    pp_mesh: DeviceMesh | None = None,
    copies: Collection[nn.Parameter] = (),
) -> torch.Tensor:
    """Scale all gradients so that their global 2-norm is at most ``max_norm``; return the norm.

    Each gradient counts once: its local squares are summed over the mesh dims that shard it and
    not over those that replicate it. ``norms``: the ``local_norms``, if they are known already.
    ``is_exact``: the norm has the same bits on every mesh, and is float64. ``pp_mesh``: ranks that
    have other parameters; ``copies``: parameters here that another of these ranks counts.
    Mutates the gradients; no host synchronization.
    """
    others = set(copies)
    shards: dict[tuple, list[torch.Tensor]] = defaultdict(list)
    parts: dict[tuple, list[torch.Tensor]] = defaultdict(list)
    for parameter, part in zip(parameters, norms or local_norms(parameters), strict=True):
        if parameter.grad is not None:
            groups = _sharding_groups(parameter.grad)
            shards[groups].append(local_part(parameter.grad))
            if parameter not in others:
                parts[groups].append(part)
    n_elements = sum(p.numel() for p in parameters)
    norm = exact_norm(shards, n_elements) if is_exact else _norm(parts, pp_mesh)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for local in shards.values():
        foreach("mul_", local, scale)
    return norm


@torch.no_grad()
def local_norms(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """The 2-norm of this rank's part of each gradient, 0-d; 0 where there is no gradient."""
    grads = [
        local_part(p).new_zeros(1) if p.grad is None else local_part(p.grad) for p in parameters
    ]
    # In float32 at least: in bfloat16 a norm would have 8 bits.
    dtype = torch.promote_types(grads[0].dtype, torch.float32)
    return list(foreach("norm", grads, 2.0, dtype=dtype))


def _norm(parts: Shards, pp_mesh: DeviceMesh | None) -> torch.Tensor:
    squares = []
    for groups, norms in parts.items():
        square = torch.stack(norms).square().sum()
        for group in groups:
            dist.all_reduce(square, group=group)
        squares.append(square)
    total = torch.stack(squares).sum()
    if pp_mesh is not None and pp_mesh.size() > 1:
        dist.all_reduce(total, group=pp_mesh.get_group())
    return total.sqrt()


def _sharding_groups(grad: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The process groups over which this gradient's shards are spread."""
    if not isinstance(grad, DTensor):
        return ()
    for placement in grad.placements:
        assert not placement.is_partial(), "a gradient was left unreduced"
    return tuple(
        grad.device_mesh.get_group(dim)
        for dim, placement in enumerate(grad.placements)
        if is_sharded(placement)
    )
