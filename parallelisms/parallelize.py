"""The one order in which a model is taken apart."""

from collections.abc import Callable
from typing import Any, Protocol

import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ParallelStyle

from config.job_config import ActivationCheckpoint, Compile, Parallelism
from parallelisms.activation_checkpoint import apply_activation_checkpoint
from parallelisms.compile import apply_compile
from parallelisms.ddp import apply_ddp
from parallelisms.fsdp import apply_fsdp
from parallelisms.parallel_dims import ParallelDims
from parallelisms.simple_fsdp import apply_simple_fsdp
from parallelisms.tensor_parallel import apply_tensor_parallel


class ShardingFacts(Protocol):
    """What a model says about where it may be cut; ``models.ModelSpec`` has it."""

    @property
    def tensor_parallel_plan(self) -> Callable[[Any], dict[str, ParallelStyle]]: ...
    @property
    def fsdp_units(self) -> Callable[[Any], list[list[nn.Module]]]: ...
    @property
    def blocks(self) -> Callable[[Any], nn.ModuleDict]: ...


def parallelize(
    model: nn.Module,
    dims: ParallelDims,
    *,
    facts: ShardingFacts,
    parallelism: Parallelism,
    activation_checkpoint: ActivationCheckpoint,
    compile: Compile,
    mp_policy: MixedPrecisionPolicy,
) -> None:
    """Shard a model that is still on the meta device. Mutates ``model``.

    The order is the contract: tensor parallel names plain submodules; checkpointing wraps blocks;
    compile sees what it wrapped; data parallel goes last, over whatever the others made.
    """
    if dims.degrees.tp > 1:
        plan = facts.tensor_parallel_plan(model.args)
        apply_tensor_parallel(model, dims.weight_mesh["tp"], plan=plan)
    mesh, is_simple = dims.fsdp_mesh, parallelism.data_parallel == "simple_fsdp"
    gathers = is_simple and mesh.size(-1) > 1
    apply_activation_checkpoint(
        facts.blocks(model),
        config=activation_checkpoint,
        frees_weights=gathers and parallelism.fsdp_reshard_after_forward != "never",
    )
    apply_compile(facts.blocks(model), config=compile, buckets_collectives=is_simple)
    units = facts.fsdp_units(model)
    if parallelism.data_parallel == "fsdp2":
        apply_fsdp(model, mesh, units=units, parallelism=parallelism, mp_policy=mp_policy)
    elif is_simple:
        apply_simple_fsdp(model, mesh, weight_mesh=dims.weight_mesh, mp_policy=mp_policy)
    else:
        apply_ddp(model, dims.weight_mesh["dp_replicate"], units=units, mp_policy=mp_policy)
