"""Global gradient norm and clipping for parameters that may live on different meshes."""

from collections import defaultdict
from collections.abc import Collection

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from optim.exact_norm import TensorsByGroups, exact_norm
from runtime.compat import foreach
from runtime.dtensor import sharding_groups, to_local
from runtime.norms import norms as norms_of


@torch.no_grad()
def clip_grad_norm_(
    parameters: list[nn.Parameter],
    max_norm: float,
    *,
    norms: list[torch.Tensor] | None = None,
    is_exact: bool = False,
    pp_mesh: DeviceMesh | None = None,
    tied_duplicates: Collection[nn.Parameter] = (),
) -> torch.Tensor:
    """Scale all gradients so that their global 2-norm is at most ``max_norm``; return the norm.

    Each gradient counts once: its local squares are summed over the mesh dims that shard it, and
    not over those that replicate it. ``norms``: result of ``local_norms``, if already computed.
    ``is_exact``: the norm is float64 and bitwise identical on every mesh. ``pp_mesh``: pipeline
    stages, which have different parameters. ``tied_duplicates``: parameters that another stage
    counts. The norm is 0-d. Mutates the gradients; never waits for the device. Collective.
    """
    duplicates, norms = set(tied_duplicates), norms or local_norms(parameters)
    shards: dict[tuple, list[torch.Tensor]] = defaultdict(list)
    norms_by_group: dict[tuple, list[torch.Tensor]] = defaultdict(list)
    for parameter, local_norm in zip(parameters, norms, strict=True):
        if parameter.grad is not None:
            groups = sharding_groups(parameter.grad)
            shards[groups].append(to_local(parameter.grad))
            if parameter not in duplicates:
                norms_by_group[groups].append(local_norm)
    if not norms_by_group:
        # A pipeline stage that is frozen.
        norms_by_group[()] = [torch.zeros_like(norms[0])]
    n_elements = sum(p.numel() for p in parameters)
    norm = exact_norm(shards, n_elements) if is_exact else _norm(norms_by_group, pp_mesh)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for local in shards.values():
        # Only a scale of their dtype is multiplied in one kernel for many gradients on GPUs.
        foreach("mul_", local, scale.to(local[0].dtype))
    return norm


@torch.no_grad()
def local_norms(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """Return the 2-norm of this rank's shard of each gradient, 0-d; 0 without a gradient."""
    grads = [to_local(p).new_zeros(1) if p.grad is None else to_local(p.grad) for p in parameters]
    # At least float32: a bfloat16 norm would have 8 significant bits.
    return norms_of(grads, torch.promote_types(grads[0].dtype, torch.float32))


def _norm(norms_by_group: TensorsByGroups, pp_mesh: DeviceMesh | None) -> torch.Tensor:
    squares, dtype = [], torch.float32
    for groups, norms in norms_by_group.items():
        dtype = norms[0].dtype
        # Replicas sum in groups of their own, whose orders NCCL chooses. Rounded from float64, the
        # norms by which they scale the same gradients are equal.
        square = torch.stack(norms).double().square().sum()
        for group in groups:
            dist.all_reduce(square, group=group)
        squares.append(square)
    total = torch.stack(squares).sum()
    if pp_mesh is not None and pp_mesh.size() > 1:
        dist.all_reduce(total, group=pp_mesh.get_group())
    return total.sqrt().to(dtype)
