"""Ways to spread a model over ranks, and the model spread that way."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from config.job_config import ActivationCheckpoint, Compile, Float8, Parallelism, Training
from forward_backward import Runner, build_runner
from models import TransformerArgs, find_model
from models.meta import build_on_meta
from parallelisms.mixed_precision import mixed_precision_policy
from parallelisms.parallel_dims import ParallelDims
from parallelisms.parallelize import parallelize
from parallelisms.shared_parameters import shared_names

CPU = torch.device("cpu")
MODE, REPLICATE = "data_parallel", "data_parallel_replicate_degree"
TP, CP, PP, EP = (f"{name}_parallel_degree" for name in ("tensor", "context", "pipeline", "expert"))
METHOD, SCHEDULE = "context_parallel_method", "pipeline_parallel_schedule"
RESHARD, REDUCE = "fsdp_reshard_after_forward", "fsdp_reduce_gradients"
SHORT = {MODE: "", REPLICATE: "replicate", TP: "tp", RESHARD: "reshard-", REDUCE: "reduce-"}
SHORT |= {CP: "cp", PP: "pp", METHOD: "", SCHEDULE: ""}


@dataclass(frozen=True)
class Layout:
    world_size: int
    parallelism: dict[str, Any] = field(default_factory=dict)
    """Keys of the TOML table, and their values."""
    recompute: ActivationCheckpoint = ActivationCheckpoint(mode="none")  # noqa: RUF009, frozen
    compile: Compile = Compile()  # noqa: RUF009, frozen
    float8: Float8 = Float8()  # noqa: RUF009, frozen

    def __str__(self) -> str:
        parts = [f"ranks{self.world_size}"]
        parts += [f"{SHORT.get(key, key)}{value}" for key, value in self.parallelism.items()]
        if self.recompute.mode != "none":
            parts.append(f"{self.recompute.mode}-{self.recompute.selective}")
        parts += ["compiled"] * self.compile.enable
        return "-".join([*parts, *[self.float8.recipe] * (self.float8.recipe != "none")])


@dataclass(frozen=True)
class Spread:
    """A model on this rank, as ``train.py`` has it."""

    model: nn.Module
    stages: list[nn.Module]
    dims: ParallelDims
    parallelism: Parallelism
    compile: Compile
    mp_policy: MixedPrecisionPolicy
    device: torch.device
    fqns: list[str]
    tied: list[str]

    def runner(self) -> Runner:
        return build_runner(
            self.model,
            self.stages,
            self.dims,
            parallelism=self.parallelism,
            compile=self.compile,
            device=self.device,
            mp_policy=self.mp_policy,
            tied=self.tied,
        )


def spread(
    name: str,
    args: TransformerArgs,
    layout: Layout,
    *,
    dtype: str = "float32",
    compute_dtype: str = "auto",
    device: torch.device = CPU,
) -> Spread:
    """Still on the meta device; ``materialize`` gives it weights."""
    spec, _ = find_model(name, "debugmodel")
    training = Training(dtype=dtype, mixed_precision_param=compute_dtype)
    parallelism = Parallelism(**layout.parallelism)
    dims = ParallelDims.build(parallelism, layout.world_size, device.type)
    model = build_on_meta(spec, args, getattr(torch, dtype))
    fqns, tied = [fqn for fqn, _ in model.named_parameters()], shared_names(model)
    mp_policy = mixed_precision_policy(training, device)
    stages = parallelize(
        model,
        dims,
        facts=spec,
        parallelism=parallelism,
        activation_checkpoint=layout.recompute,
        compile=layout.compile,
        float8=layout.float8,
        mp_policy=mp_policy,
    )
    return Spread(model, stages, dims, parallelism, layout.compile, mp_policy, device, fqns, tied)


def build_sharded(
    name: str,
    args: TransformerArgs,
    layout: Layout,
    *,
    dtype: str = "float32",
    compute_dtype: str = "auto",
) -> tuple[nn.Module, ParallelDims]:
    found = spread(name, args, layout, dtype=dtype, compute_dtype=compute_dtype)
    return found.model, found.dims
