"""The one order in which a model is taken apart."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from config.job_config import ActivationCheckpoint, Compile, Float8, Parallelism
from parallelisms.activation_checkpoint import apply_activation_checkpoint
from parallelisms.compile import apply_compile
from parallelisms.context_parallel import apply_context_parallel
from parallelisms.ddp import apply_ddp
from parallelisms.expert_parallel import apply_expert_parallel
from parallelisms.float8 import apply_float8
from parallelisms.float8_all_gather import apply_float8_all_gather
from parallelisms.fsdp import apply_fsdp
from parallelisms.parallel_dims import ParallelDims, fsdp_dims
from parallelisms.pipeline_parallel import Cuts, apply_pipeline_parallel
from parallelisms.simple_fsdp import apply_simple_fsdp
from parallelisms.tensor_parallel import Style, apply_tensor_parallel
from runtime.compat import require


class ShardingFacts(Cuts, Protocol):
    """What a model says about where it may be cut; ``models.ModelSpec`` has it."""

    @property
    def tensor_parallel_plan(self) -> Callable[[Any], Mapping[str, Style]]: ...
    @property
    def fsdp_units(self) -> Callable[[Any], list[list[nn.Module]]]: ...
    @property
    def pieces(self) -> Mapping[str, bool]: ...
    @property
    def moes(self) -> Callable[[Any], list[nn.Module]]: ...
    @property
    def delta_nets(self) -> Callable[[Any], list[nn.Module]]: ...
    @property
    def attentions(self) -> Callable[[Any], list[nn.Module]]: ...


def parallelize(
    model: nn.Module,
    dims: ParallelDims,
    *,
    facts: ShardingFacts,
    parallelism: Parallelism,
    activation_checkpoint: ActivationCheckpoint,
    compile: Compile,
    float8: Float8,
    mp_policy: MixedPrecisionPolicy,
) -> list[nn.Module]:
    """Shard a model that is still on the meta device; return the modules that this rank calls.

    That is ``model``, or the stages of a pipeline, in order. Mutates ``model``, which in any case
    holds this rank's parameters.

    The order is the contract: a stage is treated like a whole model; experts go to a mesh of their
    own; tensor parallel names plain submodules, of which float8 replaces some; checkpointing wraps
    blocks; compile sees what it wrapped; data parallel goes last, over whatever the others made.
    """
    for key in ("tensor_parallel_degree", "expert_parallel_degree"):
        if getattr(parallelism, key) > 1 and dims.fsdp_mesh.size(-1) > 1:
            # FSDP2 shards dims that they shard too; we must know the placement that says so.
            strided = "torch.distributed.tensor.placement_types:_StridedShard"
            require(strided, key=f"parallelism.{key}")
    expert_mesh = None
    if facts.moes(model) and parallelism.expert_parallel_degree * dims.degrees.tp > 1:
        expert_mesh = dims.build_expert_mesh(parallelism.expert_parallel_degree)

    def parallelize_stage(stage: nn.Module) -> None:
        moes = facts.moes(stage)
        if moes:
            apply_expert_parallel(
                moes, expert_mesh, cp_mesh=dims.cp_mesh, tp_mesh=dims.weight_mesh["tp"]
            )
        if dims.degrees.tp > 1:
            apply_tensor_parallel(
                stage,
                dims.weight_mesh["tp"],
                plan=facts.tensor_parallel_plan(stage.args),
                is_async=parallelism.tensor_parallel_async,
            )
        if dims.degrees.cp > 1:
            method = parallelism.context_parallel_method
            apply_context_parallel(
                facts.attentions(stage), facts.delta_nets(stage), dims.cp_mesh, method=method
            )
        mesh, is_simple = dims.fsdp_mesh, parallelism.data_parallel == "simple_fsdp"
        frees_weights = (
            is_simple and mesh.size(-1) > 1 and parallelism.fsdp_reshard_after_forward != "never"
        )
        apply_float8(facts.blocks(stage), config=float8)
        pieces = facts.pieces if compile.enable else {}
        apply_activation_checkpoint(
            facts.blocks(stage),
            config=activation_checkpoint,
            pieces=pieces,
            frees_weights=frees_weights,
        )
        apply_compile(
            facts.blocks(stage),
            config=compile,
            pieces=pieces,
            recomputes=frees_weights or activation_checkpoint.mode != "none",
            buckets_collectives=is_simple,
        )
        units = facts.fsdp_units(stage)
        if parallelism.data_parallel == "fsdp2":
            apply_fsdp(
                stage,
                mesh,
                units=units,
                parallelism=parallelism,
                mp_policy=mp_policy,
                experts=[cast(nn.Module, moe.experts) for moe in moes if expert_mesh],
                expert_mesh=expert_mesh and fsdp_dims(expert_mesh, "dp_shard_ep"),
            )
            apply_float8_all_gather(stage, mesh, parallelism=parallelism, mp_policy=mp_policy)
        elif is_simple:
            apply_simple_fsdp(stage, mesh, weight_mesh=dims.weight_mesh, mp_policy=mp_policy)
        else:
            apply_ddp(stage, dims.weight_mesh, units=units, mp_policy=mp_policy)

    if dims.degrees.pp == 1:
        parallelize_stage(model)
        return [model]
    return apply_pipeline_parallel(
        model,
        dims.pp_mesh,
        cuts=facts,
        parallelism=parallelism,
        parallelize_stage=parallelize_stage,
    )
