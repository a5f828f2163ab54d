"""Distributed data parallel: every rank holds the whole model (arXiv 2006.15704)."""

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from parallelisms.gradient_reduction import sum_gradients
from runtime.compat import find
from runtime.log import logger


def apply_ddp(
    model: nn.Module,
    weight_mesh: DeviceMesh,
    *,
    units: list[list[nn.Module]],
    mp_policy: MixedPrecisionPolicy,
) -> None:
    """``replicate`` each unit over "dp_replicate", then the root: an all-reduce per unit.

    Mutates ``model``: its parameters become DTensors. Unlike ``DistributedDataParallel`` it has
    FSDP2's mixed precision and composes with tensor parallel.
    """
    replicate_mesh = weight_mesh["dp_replicate"]
    wrap, mesh = find("torch.distributed._composable.replicate_with_fsdp:replicate"), replicate_mesh
    if wrap is None:
        # HSDP on shards of one rank does the same, and copies each weight that it would gather.
        wrap, mesh = fully_shard, weight_mesh["dp_replicate", "dp_shard_cp"]
    for unit in units:
        wrap(unit, mesh=mesh, mp_policy=mp_policy)
    wrap(model, mesh=mesh, mp_policy=mp_policy)
    sum_gradients(model, replicate_mesh)
    logger.info(
        "ddp: %d units on %d ranks, compute in %s, reduction in %s",
        len(units), replicate_mesh.size(), mp_policy.param_dtype, mp_policy.reduce_dtype,
    )  # fmt: skip
