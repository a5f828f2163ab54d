"""Small models, their layouts over ranks, and digests of their weights."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from build_model import ShardedModel, build_sharded_model
from config import JobConfig
from config.job_config import ActivationCheckpoint, Compile, Float8, Model, Parallelism, Training
from models import TransformerArgs, find_model
from models.qwen3_moe import Qwen3MoeArgs
from models.qwen3_next import Qwen3NextArgs
from parallelisms.parallel_dims import ParallelDims
from runtime.dtensor import to_local

CPU, SEQ_LEN = torch.device("cpu"), 16
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


@cache
def args_of(name: str, n_layers: int = 2) -> TransformerArgs:
    """Shape of a debug model of few layers, with a balance loss and both kinds of layers."""
    args = find_model(name, "debugmodel")[1]
    args = replace(args, n_layers=n_layers, max_seq_len=SEQ_LEN, tie_embeddings=False)
    if isinstance(args, Qwen3MoeArgs):
        args = replace(args, balance_weight=0.01)
    return replace(args, attention_every=2) if isinstance(args, Qwen3NextArgs) else args


def small_args(name: str, flavor: str, n_layers: int = 2) -> TransformerArgs:
    """Small model whose vocabulary size, 61, divides by no degree."""
    args = find_model(name, flavor)[1]
    return replace(args, n_layers=n_layers, n_kv_heads=4, vocab_size=61, max_seq_len=8)


def shard_debugmodel(
    name: str,
    args: TransformerArgs,
    layout: Layout,
    *,
    dtype: str = "float32",
    compute_dtype: str = "auto",
    device: torch.device = CPU,
) -> ShardedModel:
    """The model as ``train.py`` shards it, still on the meta device."""
    spec, _ = find_model(name, "debugmodel")
    config = JobConfig(
        model=Model(name=name),
        training=Training(dtype=dtype, mixed_precision_param=compute_dtype),
        parallelism=Parallelism(**layout.parallelism),
        activation_checkpoint=layout.recompute,
        compile=layout.compile,
        float8=layout.float8,
    )
    dims = ParallelDims.build(config.parallelism, layout.world_size, device.type)
    return build_sharded_model(spec, args, config, dims, device)


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of the bytes of the whole tensor."""
    if tensor.dtype == torch.int16:
        # Gloo gathers none.
        tensor = on_shards(torch.Tensor.int, tensor)
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    content = whole.detach().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.sha256(content).hexdigest()


def on_shards(function: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> Any:
    """Return ``function`` of each element, placed like ``tensor``.

    DTensor takes up to a quarter of a second to place the first result of an operator.
    """
    local = function(to_local(tensor.detach()))
    result = torch.empty_like(tensor.detach(), dtype=local.dtype)
    to_local(result).copy_(local)
    return result
