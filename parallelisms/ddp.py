"""Distributed data parallel: every rank holds the whole model (arXiv 2006.15704)."""

import torch.nn as nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from parallelisms.gradient_reduction import sum_gradients
from runtime.log import logger


def apply_ddp(
    model: nn.Module,
    replicate_mesh: DeviceMesh,
    *,
    units: list[list[nn.Module]],
    mp_policy: MixedPrecisionPolicy,
) -> None:
    """``replicate`` each unit over the 1-D mesh, then the root: an all-reduce per unit.

    Mutates ``model``: its parameters become DTensors. Unlike ``DistributedDataParallel`` it has
    FSDP2's mixed precision and composes with tensor parallel.
    """
    for unit in units:
        replicate(unit, mesh=replicate_mesh, mp_policy=mp_policy)
    replicate(model, mesh=replicate_mesh, mp_policy=mp_policy)
    sum_gradients(model, replicate_mesh)
    logger.info(
        "ddp: %d units on %d ranks, compute in %s, reduction in %s",
        len(units), replicate_mesh.size(), mp_policy.param_dtype, mp_policy.reduce_dtype,
    )  # fmt: skip
