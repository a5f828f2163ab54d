"""Ways to spread a model over ranks, and the model spread that way."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn

from config.job_config import ActivationCheckpoint, Compile, Parallelism, Training
from models import TransformerArgs, find_model
from models.meta import build_on_meta
from parallelisms.mixed_precision import mixed_precision_policy
from parallelisms.parallel_dims import ParallelDims
from parallelisms.parallelize import parallelize

CPU = torch.device("cpu")
MODE, REPLICATE = "data_parallel", "data_parallel_replicate_degree"
TP = "tensor_parallel_degree"
RESHARD, REDUCE = "fsdp_reshard_after_forward", "fsdp_reduce_gradients"
SHORT = {MODE: "", REPLICATE: "replicate", TP: "tp", RESHARD: "reshard-", REDUCE: "reduce-"}


@dataclass(frozen=True)
class Layout:
    world_size: int
    parallelism: dict[str, Any] = field(default_factory=dict)
    """Keys of the TOML table, and their values."""
    recompute: ActivationCheckpoint = ActivationCheckpoint(mode="none")  # noqa: RUF009, frozen
    compile: Compile = Compile()  # noqa: RUF009, frozen

    def __str__(self) -> str:
        parts = [f"ranks{self.world_size}"]
        parts += [f"{SHORT.get(key, key)}{value}" for key, value in self.parallelism.items()]
        if self.recompute.mode != "none":
            parts.append(f"{self.recompute.mode}-{self.recompute.selective}")
        return "-".join([*parts, *["compiled"] * self.compile.enable])


def build_sharded(
    name: str,
    args: TransformerArgs,
    layout: Layout,
    *,
    dtype: str = "float32",
    compute_dtype: str = "auto",
) -> tuple[nn.Module, ParallelDims]:
    """Still on the meta device; ``materialize`` gives it weights."""
    spec, _ = find_model(name, "debugmodel")
    training = Training(dtype=dtype, mixed_precision_param=compute_dtype)
    parallelism = Parallelism(**layout.parallelism)
    dims = ParallelDims.build(parallelism, layout.world_size, "cpu")
    model = build_on_meta(spec, args, getattr(torch, dtype))
    parallelize(
        model,
        dims,
        facts=spec,
        parallelism=parallelism,
        activation_checkpoint=layout.recompute,
        compile=layout.compile,
        mp_policy=mixed_precision_policy(training, CPU),
    )
    return model, dims
