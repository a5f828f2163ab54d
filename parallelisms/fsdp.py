"""Fully sharded data parallel: FSDP2 on a 1-D mesh, HSDP on a 2-D one (arXiv 2304.11277)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self, cast

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
from parallelisms.parametrization import cast_weights
from runtime.dtensor import to_local
from runtime.log import logger


@dataclass(frozen=True)
class FSDPPolicy:
    """Policy on freeing gathered weights and reducing gradients, as ``[parallelism]`` implies.

    Read by ``apply_fsdp`` (PyTorch's ``reshard_after_forward``), by ``set_gradient_sync``, by
    activation checkpointing (SimpleFSDP frees weights by recomputing their gather), by the float8
    all-gather and by ``comm_volume``.
    """

    reshard_units: bool | int
    """``reshard_after_forward`` of all units but the last; False keeps weights until backward."""
    reshard_group_size: int | None
    """Ranks that keep the weights sharded among them after forward; None: no smaller group."""
    reshard_last_unit: bool | int
    """``reshard_after_forward`` of the last unit."""
    reshard_experts: bool
    """``reshard_after_forward`` of experts, units of their own; they have no smaller group."""
    reshard_always: bool
    """"always" was set: FSDP2 even on one rank, to free the cast weights after forward."""
    reshard_after_backward: bool
    """False keeps gathered weights for all microbatches of a step."""
    reduce_every_microbatch: bool
    all_reduce_every_microbatch: bool
    """False: replicas all-reduce only the step's sum of their shards."""

    @classmethod
    def of(cls, parallelism: Parallelism, *, may_skip_layers: bool = False) -> Self:
        """Resolve the keys ``fsdp_reshard_after_forward`` and ``fsdp_reduce_gradients``.

        ``may_skip_layers``: not every microbatch uses every weight.
        """
        setting, mode = parallelism.fsdp_reshard_after_forward, parallelism.data_parallel
        has_pp = parallelism.pipeline_parallel_degree > 1
        # With a pipeline, every microbatch would gather the weights again.
        reshard = "never" if setting == "default" and has_pp and mode == "fsdp2" else setting
        size = reshard if isinstance(reshard, int) else None
        # Replicas of DDP hold whole gradients anyway: to reduce them once costs no memory.
        reduces = mode != "ddp" and parallelism.fsdp_reduce_gradients == "every_microbatch"
        return cls(
            reshard_units=size or reshard != "never",
            reshard_group_size=size,
            # Backward starts with the last unit; resharding it would only gather it again.
            reshard_last_unit=size or reshard == "always",
            # An interleaved schedule gathers experts before the first forward. Freed after it, they
            # would be gathered by selective recomputation, which only repeats forward's operators.
            reshard_experts=reshard != "never" and not has_pp,
            reshard_always=reshard == "always",
            # Read by ``SPMDRunner`` only: in a pipeline, PyTorch's schedule decides.
            reshard_after_backward=setting != "never",
            reduce_every_microbatch=reduces,
            # FSDP2 would forget the sum of a layer that the last microbatch skips. SimpleFSDP has
            # no choice: autograd reduces in every backward.
            all_reduce_every_microbatch=mode == "simple_fsdp" or (may_skip_layers and reduces),
        )


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
    averaged. On one rank nothing is sharded: ``cast_weights`` makes modules compute in
    ``param_dtype``, because FSDP2 would copy weights and gradients even there.
    """
    policy = FSDPPolicy.of(parallelism)
    if fsdp_mesh.size() == 1 and _is_only_cast(model, policy, parallelism, mp_policy):
        assert mp_policy.param_dtype is not None
        cast_weights(model, mp_policy.param_dtype)
        logger.info("fsdp2: one rank, nothing to shard; compute in %s", mp_policy.param_dtype)
        return
    offload = OffloadPolicy()
    if parallelism.fsdp_cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=fsdp_mesh.device_type != "cpu")

    def shard(unit: nn.Module | list[nn.Module], mesh: DeviceMesh, *, reshard: bool | int) -> None:
        # None is dim 0, the only one on which FSDP2 reshards to a smaller group.
        has_group = policy.reshard_group_size is not None
        fully_shard(
            unit,
            mesh=mesh,
            reshard_after_forward=reshard,
            shard_placement_fn=None if has_group else lambda p: shard_placement(p, mesh.size(-1)),
            mp_policy=mp_policy,
            offload_policy=offload,
        )

    if expert_mesh is not None:
        for module in experts:
            shard(module, expert_mesh, reshard=policy.reshard_experts)
    for unit in units:
        is_last = unit is units[-1]
        reshard = policy.reshard_last_unit if is_last else policy.reshard_units
        shard(unit, fsdp_mesh, reshard=reshard)
    # The root starts and ends the units' passes, and holds what a user's model has outside them.
    fully_shard(model, mesh=fsdp_mesh, mp_policy=mp_policy, offload_policy=offload)
    for unit in units:
        # A lookup's backward needs no weights.
        if all(isinstance(module, nn.Embedding) for module in unit):
            cast(FSDPModule, unit[0]).set_unshard_in_backward(False)
    disable_gradient_averaging(model, fsdp_mesh, *([] if expert_mesh is None else [expert_mesh]))
    _prefetch([unit[0] for unit in units], experts, parallelism)
    sizes = " x ".join(str(size) for size in fsdp_mesh.shape)
    logger.info(
        "fsdp2: %d units on a mesh of %s, compute in %s, reduction in %s; reshard after forward: "
        "units %s, last unit %s, experts %s",
        len(units) + len(experts), sizes, mp_policy.param_dtype, mp_policy.reduce_dtype,
        policy.reshard_units, policy.reshard_last_unit, policy.reshard_experts if experts else "-",
    )  # fmt: skip


def _is_only_cast(
    model: nn.Module,
    policy: FSDPPolicy,
    parallelism: Parallelism,
    mp_policy: MixedPrecisionPolicy,
) -> bool:
    """True if casts do all that FSDP2 would on one rank, and may be kept until backward."""
    parameters = list(model.parameters())
    return (
        not policy.reshard_always
        and parallelism.pipeline_parallel_degree == 1
        and not parallelism.fsdp_cpu_offload
        and not any(isinstance(parameter, DTensor) for parameter in parameters)
        # A cast's gradient has the dtype of compute, then the weight's, and never a third one.
        and mp_policy.reduce_dtype in (mp_policy.param_dtype, parameters[0].dtype)
    )


def shard_placement(parameter: nn.Parameter, n_shards: int) -> Shard:
    """Shard dim 0 or, if it is shorter than ``n_shards``, the longest other that splits evenly."""
    shape = to_local(parameter).shape
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


def disable_gradient_averaging(model: nn.Module, *meshes: DeviceMesh) -> None:
    """Turn off the averaging in what ``fully_shard`` or ``replicate`` made of ``model``."""
    # A group of one averages nothing either, and a factor would cost a pass over the gradients.
    if all(mesh.size() == 1 for mesh in meshes):
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # A factor of 1 still asks for a scaled reduction, which gloo does not have.
            module.set_force_sum_reduction_for_comms(True)


def set_gradient_sync(model: nn.Module, policy: FSDPPolicy, *, is_last: bool) -> None:
    """Set what the next backward communicates and frees, before its forward. Mutates ``model``.

    ``is_last``: the step's last microbatch. The sum of a step's gradients is the same in any case.
    """
    if not isinstance(model, FSDPModule):
        return
    model.set_requires_gradient_sync(is_last or policy.reduce_every_microbatch)
    model.set_requires_all_reduce(is_last or policy.all_reduce_every_microbatch)
    if not policy.reshard_after_backward:
        # Weights kept for a whole backward may as well be kept until they change.
        model.set_reshard_after_backward(is_last)


def reshard(model: nn.Module) -> None:
    """Free the gathered weights of all units that have some. Mutates ``model``."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
