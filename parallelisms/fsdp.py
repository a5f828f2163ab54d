"""Fully sharded data parallel: FSDP2, and HSDP on a 2-D mesh."""

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from config.job_config import Parallelism, Training
from runtime.distributed import compute_dtype
from runtime.log import logger


def apply_fsdp(
    model: nn.Module,
    fsdp_mesh: DeviceMesh,
    *,
    units: list[list[nn.Module]],
    parallelism: Parallelism,
    mp_policy: MixedPrecisionPolicy,
) -> None:
    """``fully_shard`` each unit, then the root. Mutates ``model``: its parameters become DTensors.

    Runs on one rank too: it shards nothing there but sets the mixed precision, so no second
    mechanism for that exists. Gradients are summed over ranks, never averaged.
    """
    reshard = parallelism.fsdp_reshard_after_forward != "never"
    for unit in units[:-1]:
        fully_shard(unit, mesh=fsdp_mesh, mp_policy=mp_policy, reshard_after_forward=reshard)
    # Backward starts with the last unit; resharding it would only gather it again.
    reshard = parallelism.fsdp_reshard_after_forward == "always"
    fully_shard(units[-1], mesh=fsdp_mesh, mp_policy=mp_policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=fsdp_mesh, mp_policy=mp_policy)
    for module in model.modules():
        # A group of one averages nothing either, and a factor would cost a pass over the gradients.
        if isinstance(module, FSDPModule) and fsdp_mesh.size() > 1:
            module.set_gradient_divide_factor(1.0)
            # A factor of 1 still asks for a scaled reduction, which gloo does not have.
            module.set_force_sum_reduction_for_comms(True)
    sizes = " x ".join(str(size) for size in fsdp_mesh.shape)
    logger.info(
        "fsdp2: %d units on a mesh of %s, compute in %s, reduction in %s, reshard after forward %s",
        len(units), sizes, mp_policy.param_dtype, mp_policy.reduce_dtype,
        parallelism.fsdp_reshard_after_forward,
    )  # fmt: skip


def mixed_precision_policy(training: Training, device: torch.device) -> MixedPrecisionPolicy:
    """Compute and reduction dtypes; with weights that are not float32, one dtype for everything."""
    is_mixed = training.dtype == "float32"
    reduce_dtype = training.mixed_precision_reduce if is_mixed else training.dtype
    return MixedPrecisionPolicy(
        param_dtype=compute_dtype(training, device),
        reduce_dtype=getattr(torch, reduce_dtype),
        # The blocks' rope must keep its precision.
        cast_forward_inputs=False,
    )
