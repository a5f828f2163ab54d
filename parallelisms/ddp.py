"""Distributed data parallel: every rank holds the whole model (arXiv 2006.15704)."""

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from parallelisms.fsdp import disable_gradient_averaging
from runtime.compat import find
from runtime.log import logger


def apply_ddp(
    model: nn.Module,
    weight_mesh: DeviceMesh,
    *,
    units: list[list[nn.Module]],
    mp_policy: MixedPrecisionPolicy,
) -> None:
    """Apply ``replicate`` to each unit, then to the root: one gradient all-reduce per unit.

    Mutates ``model``: its parameters become DTensors, replicated over "dp_replicate". Unlike
    ``DistributedDataParallel``, it has FSDP2's mixed precision and composes with tensor parallel.
    """
    replicate_mesh = weight_mesh["dp_replicate"]
    wrap, mesh = find("torch.distributed._composable.replicate_with_fsdp:replicate"), replicate_mesh
    if wrap is None:
        # HSDP with one shard per replica is equivalent, but copies each weight where it gathers.
        wrap, mesh = fully_shard, weight_mesh["dp_replicate", "dp_shard_cp"]
    for unit in units:
        wrap(unit, mesh=mesh, mp_policy=mp_policy)
    wrap(model, mesh=mesh, mp_policy=mp_policy)
    disable_gradient_averaging(model, replicate_mesh)
    logger.info(
        "ddp: %d units on %d ranks, compute in %s, reduction in %s",
        len(units), replicate_mesh.size(), mp_policy.param_dtype, mp_policy.reduce_dtype,
    )  # fmt: skip
