"""Apply all parallelisms in one fixed order."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from config.job_config import ActivationCheckpoint, Compile, Float8, Model, Parallelism
from parallelisms.activation_checkpoint import apply_activation_checkpoint
from parallelisms.compile import apply_compile
from parallelisms.context_parallel import apply_context_parallel
from parallelisms.ddp import apply_ddp
from parallelisms.expert_parallel import apply_expert_parallel
from parallelisms.float8 import apply_float8, check_float8
from parallelisms.float8_all_gather import apply_float8_all_gather
from parallelisms.float8_tensor_parallel import apply_float8_tensor_parallel
from parallelisms.fsdp import FSDPPolicy, apply_fsdp
from parallelisms.parallel_dims import ParallelDims, fsdp_submesh
from parallelisms.pipeline_parallel import PipelineSplit, apply_pipeline_parallel
from parallelisms.simple_fsdp import apply_simple_fsdp
from parallelisms.tensor_parallel import Style, apply_tensor_parallel, warn_if_unmatched
from parallelisms.tied_weights import check_recomputed_ties, forbid_untying
from runtime.compat import require


class ShardingSpec(PipelineSplit, Protocol):
    """A model family's sharding, as ``models.ModelSpec`` describes it."""

    @property
    def tensor_parallel_plan(self) -> Callable[[Any], Mapping[str, Style]]: ...
    @property
    def fsdp_units(self) -> Callable[[Any], list[list[nn.Module]]]: ...
    @property
    def compile_regions(self) -> Mapping[str, bool]: ...
    @property
    def moes(self) -> Callable[[Any], list[nn.Module]]: ...
    @property
    def delta_nets(self) -> Callable[[Any], list[nn.Module]]: ...
    @property
    def attentions(self) -> Callable[[Any], list[nn.Module]]: ...


class ParallelConfig(Protocol):
    """The TOML tables that ``parallelize`` reads; ``config.JobConfig`` has them."""

    @property
    def model(self) -> Model: ...
    @property
    def parallelism(self) -> Parallelism: ...
    @property
    def activation_checkpoint(self) -> ActivationCheckpoint: ...
    @property
    def compile(self) -> Compile: ...
    @property
    def float8(self) -> Float8: ...


def parallelize(
    model: nn.Module,
    dims: ParallelDims,
    *,
    spec: ShardingSpec,
    config: ParallelConfig,
    mp_policy: MixedPrecisionPolicy,
) -> list[nn.Module]:
    """Apply all parallelisms to ``model``, on the meta device. Mutates ``model``. Collective.

    Returns the modules that this rank calls: ``model``, or its pipeline stages in order. In both
    cases ``model`` holds this rank's parameters. The order, in each pipeline stage:

    1. expert parallel: experts become DTensors on a mesh of their own, before FSDP claims them
    2. tensor parallel: its plan names plain linear modules, some of which float8 replaces
    3. context parallel: wraps forward of ``attention.inner``, which must see this rank's heads
    4. float8: replaces linear modules, and keeps their DTensor weights
    5. activation checkpointing: wraps the blocks' forward, or regions of it
    6. compile: compiles what checkpointing wrapped, so that recomputation is part of the graph
    7. data parallel: shards whatever parameters exist by now

    Raises ``ValueError`` if the tensor parallel plan misses a parameter, and ``ConfigError`` if
    this PyTorch lacks what a key needs, or if a shared weight would be split or recomputed apart.
    """
    parallelism, expert_mesh = config.parallelism, None
    check_float8(model, spec.blocks(model), config=config.float8)
    for key in ("tensor_parallel_degree", "expert_parallel_degree"):
        if getattr(parallelism, key) > 1 and dims.fsdp_mesh.size(-1) > 1:
            # FSDP2 shards dims that these sharded before; this placement says in which order.
            strided = "torch.distributed.tensor.placement_types:_StridedShard"
            require(strided, key=f"parallelism.{key}")
    if spec.moes(model) and parallelism.expert_parallel_degree * dims.degrees.tp > 1:
        expert_mesh = dims.build_expert_mesh(parallelism.expert_parallel_degree)

    if dims.degrees.tp > 1 and config.model.is_outside:
        warn_if_unmatched(model, spec.tensor_parallel_plan(cast(Any, model).args))

    def parallelize_stage(stage: nn.Module) -> None:
        with forbid_untying(stage):
            _shard_layers(stage, dims, spec=spec, parallelism=parallelism, expert_mesh=expert_mesh)
            _wrap_blocks(stage, dims, spec=spec, config=config)
            _apply_data_parallel(
                stage,
                dims,
                spec=spec,
                parallelism=parallelism,
                mp_policy=mp_policy,
                expert_mesh=expert_mesh,
            )

    if dims.degrees.pp == 1:
        parallelize_stage(model)
        return [model]
    return apply_pipeline_parallel(
        model,
        dims.pp_mesh,
        split=spec,
        parallelism=parallelism,
        parallelize_stage=parallelize_stage,
    )


def _shard_layers(
    stage: nn.Module,
    dims: ParallelDims,
    *,
    spec: ShardingSpec,
    parallelism: Parallelism,
    expert_mesh: DeviceMesh | None,
) -> None:
    """Apply expert, tensor and context parallel."""
    moes, tp_mesh = spec.moes(stage), dims.weight_mesh["tp"]
    frozen = [fqn for fqn, p in stage.named_parameters() if not p.requires_grad]
    if moes:
        apply_expert_parallel(moes, expert_mesh, cp_mesh=dims.cp_mesh, tp_mesh=tp_mesh)
    if dims.degrees.tp > 1:
        plan = spec.tensor_parallel_plan(cast(Any, stage).args)
        apply_tensor_parallel(stage, tp_mesh, plan=plan, is_async=parallelism.tensor_parallel_async)
    for fqn in frozen:
        # Some styles, of PyTorch too, make a new parameter, which requires a gradient.
        stage.get_parameter(fqn).requires_grad_(False)
    if dims.degrees.cp > 1:
        apply_context_parallel(
            spec.attentions(stage),
            spec.delta_nets(stage),
            dims.cp_mesh,
            method=parallelism.context_parallel_method,
        )


def _wrap_blocks(
    stage: nn.Module, dims: ParallelDims, *, spec: ShardingSpec, config: ParallelConfig
) -> None:
    """Apply float8, activation checkpointing and compile."""
    blocks, regions = spec.blocks(stage), spec.compile_regions if config.compile.enable else {}
    is_simple = config.parallelism.data_parallel == "simple_fsdp"
    is_sharded = dims.fsdp_mesh.size(-1) > 1
    # SimpleFSDP frees gathered weights by recomputing the gather.
    frees_weights = (
        is_simple and is_sharded and bool(FSDPPolicy.of(config.parallelism).reshard_units)
    )
    mode = config.activation_checkpoint.mode
    if frees_weights or mode in ("selective", "full"):
        check_recomputed_ties(stage, blocks, regions=regions if mode != "full" else {})
    apply_float8(stage, blocks, config=config.float8)
    apply_float8_tensor_parallel(blocks)
    apply_activation_checkpoint(
        blocks,
        config=config.activation_checkpoint,
        regions=regions,
        frees_weights=frees_weights,
        # No family of Shardloom has random ops.
        is_random=config.model.is_outside,
    )
    apply_compile(
        blocks,
        config=config.compile,
        regions=regions,
        recomputes=frees_weights or mode != "none",
        buckets_collectives=is_simple,
        splits_matmuls=config.parallelism.tensor_parallel_async,
    )


def _apply_data_parallel(
    stage: nn.Module,
    dims: ParallelDims,
    *,
    spec: ShardingSpec,
    parallelism: Parallelism,
    mp_policy: MixedPrecisionPolicy,
    expert_mesh: DeviceMesh | None,
) -> None:
    mesh, units = dims.fsdp_mesh, spec.fsdp_units(stage)
    if parallelism.data_parallel == "fsdp2":
        experts = [cast(Any, moe).experts for moe in spec.moes(stage) if expert_mesh]
        apply_fsdp(
            stage,
            mesh,
            units=units,
            parallelism=parallelism,
            mp_policy=mp_policy,
            experts=experts,
            expert_mesh=expert_mesh and fsdp_submesh(expert_mesh, "efsdp"),
        )
        apply_float8_all_gather(stage, mesh, parallelism=parallelism, mp_policy=mp_policy)
    elif parallelism.data_parallel == "simple_fsdp":
        apply_simple_fsdp(stage, mesh, weight_mesh=dims.weight_mesh, mp_policy=mp_policy)
    else:
        apply_ddp(stage, dims.weight_mesh, units=units, mp_policy=mp_policy)
