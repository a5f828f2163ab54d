"""Fully sharded data parallel: FSDP2 on a 1-D mesh, HSDP on a 2-D one (arXiv 2304.11277)."""

from collections.abc import Sequence
from itertools import chain
from typing import Any, cast

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from config.job_config import Parallelism
from parallelisms.gradient_reduction import sum_gradients
from parallelisms.weights_in_forward import cast_weights
from runtime.distributed import local_part
from runtime.log import logger


def apply_fsdp(
    model: nn.Module,
    fsdp_mesh: DeviceMesh,
    *,
    units: list[list[nn.Module]],
    parallelism: Parallelism,
    mp_policy: MixedPrecisionPolicy,
    experts: Sequence[nn.Module] = (),
    expert_mesh: DeviceMesh | None = None,
) -> None:
    """``fully_shard`` each unit, then the root. Mutates ``model``: its parameters become DTensors.

    ``experts`` are units of their own, on ``expert_mesh``. Gradients are summed over ranks, never
    averaged. On one rank FSDP2 would copy weights and gradients all the same: there they stay plain
    tensors, and modules read them cast.
    """
    if fsdp_mesh.size() == 1 and _is_only_cast(model, parallelism, mp_policy):
        assert mp_policy.param_dtype is not None
        cast_weights(model, mp_policy.param_dtype)
        logger.info("fsdp2: one rank, nothing to shard; compute in %s", mp_policy.param_dtype)
        return
    reshard = parallelism.fsdp_reshard_after_forward
    if reshard == "default" and parallelism.pipeline_parallel_degree > 1:
        # Every microbatch would gather the weights anew.
        reshard = "never"
    offload = OffloadPolicy()
    if parallelism.fsdp_cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=fsdp_mesh.device_type != "cpu")

    def shard(unit: nn.Module | list[nn.Module], mesh: DeviceMesh, *, is_kept: bool) -> None:
        fully_shard(
            unit,
            mesh=mesh,
            reshard_after_forward=reshard if isinstance(reshard, int) else not is_kept,
            shard_placement_fn=lambda parameter: shard_placement(parameter, mesh.size(-1)),
            mp_policy=mp_policy,
            offload_policy=offload,
        )

    if expert_mesh is not None:
        for module in experts:
            # A pipeline keeps what backward gathered, which recomputation would not gather again.
            is_kept = reshard == "never" or parallelism.pipeline_parallel_degree > 1
            shard(module, expert_mesh, is_kept=is_kept)
    for unit in units:
        # Backward starts with the last unit; resharding it would only gather it again.
        is_last = reshard == "default" and unit is units[-1]
        shard(unit, fsdp_mesh, is_kept=is_last or reshard == "never")
    # The units hold every parameter; the root is what starts and ends their passes.
    fully_shard(model, mesh=fsdp_mesh, mp_policy=mp_policy, offload_policy=offload)
    for unit in units:
        # A lookup's backward needs no weights.
        if all(isinstance(module, nn.Embedding) for module in unit):
            cast(FSDPModule, unit[0]).set_unshard_in_backward(False)
    sum_gradients(model, fsdp_mesh, *([] if expert_mesh is None else [expert_mesh]))
    _prefetch([unit[0] for unit in units], experts, parallelism)
    sizes = " x ".join(str(size) for size in fsdp_mesh.shape)
    logger.info(
        "fsdp2: %d units on a mesh of %s, compute in %s, reduction in %s, reshard after forward %s",
        len(units) + len(experts), sizes,
        mp_policy.param_dtype, mp_policy.reduce_dtype, reshard,
    )  # fmt: skip


def _is_only_cast(
    model: nn.Module, parallelism: Parallelism, mp_policy: MixedPrecisionPolicy
) -> bool:
    """Whether, on one rank, casts do all that FSDP2 would, and may be kept until backward."""
    parameters = list(model.parameters())
    return (
        parallelism.fsdp_reshard_after_forward != "always"
        and parallelism.pipeline_parallel_degree == 1
        and not parallelism.fsdp_cpu_offload
        and not any(isinstance(parameter, DTensor) for parameter in parameters)
        # A cast's gradient has the dtype of compute, then the weight's, and never a third one.
        and mp_policy.reduce_dtype in (mp_policy.param_dtype, parameters[0].dtype)
    )


def shard_placement(parameter: nn.Parameter, n_shards: int) -> Shard:
    """Rows or, if ranks are more, the longest other dim that splits evenly, if there is one."""
    shape = local_part(parameter).shape
    even = [dim for dim in range(1, len(shape)) if shape[dim] % n_shards == 0]
    if shape[0] >= n_shards or not even:
        return Shard(0)
    return Shard(max(even, key=lambda dim: shape[dim]))


def _prefetch(
    units: list[nn.Module], experts: Sequence[nn.Module], parallelism: Parallelism
) -> None:
    """Gather units as far ahead of their use as configured, and experts with their block.

    Left alone, experts are gathered only once the host knows how many tokens come from other ranks,
    and by then the device has nothing left to do; in backward, only when they are needed.
    """
    ahead, behind = parallelism.fsdp_forward_prefetch, parallelism.fsdp_backward_prefetch
    if experts:
        # By itself PyTorch is one unit ahead in backward, and counts experts as a unit.
        behind = max(behind, 1)
    groups: list[list[Any]] = []
    for unit in units:
        inside = set(unit.modules())
        groups.append([unit, *(module for module in experts if module in inside)])
    for index, (unit, *own) in enumerate(groups):
        if ahead or own:
            after = chain(*groups[index + 1 : index + 1 + ahead])
            unit.set_modules_to_forward_prefetch([*own, *after])
        if behind:
            before = chain(*groups[max(0, index - behind) : index][::-1])
            unit.set_modules_to_backward_prefetch([*before])
