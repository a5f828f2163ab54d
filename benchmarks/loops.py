"""``train.py`` and a bare PyTorch loop, with the same model, batch and settings, taking turns."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from pydantic import Field
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.rows import ROOT, Keys
from benchmarks.turns import Turns
from config import load_config
from config.job_config import Comm, Count, NonNegative, Section
from kernels.block_attention import apply_block_attention
from models import TransformerArgs, find_model
from models.meta import build_on_meta
from parallelisms.materialize import materialize
from runtime.distributed import init_distributed

PROBED = 64


class Case(Section):
    """Loops to compare, and their common settings."""

    loops: list[str]
    """Keys of LOOPS; the ratios are to "bare", if it is one of them."""
    family: Literal["llama3", "qwen3", "qwen3_moe", "qwen3_next"] = "llama3"
    """Peers are compared with llama3 only."""
    flavor: str = "debugmodel"
    """A flavor of the family."""
    shape: dict[str, int | bool] = Field(default_factory=dict)
    """Fields of TransformerArgs that differ from the flavor's."""
    ranks: Count = 1
    seq_len: Count
    batch_size: Count
    """Sequences on each rank."""
    dtype: Literal["float32", "bfloat16"]
    """The dtype of compute; weights are float32."""
    compile: bool = False
    keys: Keys = Field(default_factory=dict)
    """More of train.py's keys, for the loop "train" only."""
    packages: list[str] = Field(default_factory=list)
    """Distributions that must be installed, such as one with kernels."""
    restarts: Count = 1
    """Starts of all loops: processes differ in speed by up to a tenth."""
    warmup: NonNegative = 3
    """Turns before those that count, the first of which is one step in any case."""
    turns: Count
    """Turns that count, after each start."""
    steps_per_turn: Count = 1
    limit_seconds: Count = 600

    @property
    def args(self) -> TransformerArgs:
        sizes: dict[str, Any] = {**self.shape, "max_seq_len": self.seq_len}
        return replace(find_model(self.family, self.flavor)[1], **sizes)


class Ready(NamedTuple):
    """A loop's report before its first step."""

    matmul_precision: str
    probe: list[float] | None
    """Some of the first batch's logits in float32, to check that two loops' models are the same."""


def train_loop(turns: Turns, case: Case) -> None:
    """``train.py`` as it is; a step begins where it asks for the batch."""
    import train  # It imports much that other loops do not need.
    from data.loader import MicrobatchLoader
    from data.step_batches import StepBatches
    from launcher.post_mortem import RankHeartbeat
    from parallelisms.parallel_dims import ParallelDims
    from run_spec import RunSpec, resolve
    from runtime.control import RunControl

    class PacedRun(RunSpec):
        def build_batches(
            self, loader: MicrobatchLoader, control: RunControl, dims: ParallelDims
        ) -> StepBatches:
            batches = super().build_batches(loader, control, dims)
            next_batch = batches.next

            def paced(step: int, *, is_writing: bool) -> Any:
                turns.note = turns.note or Ready(torch.get_float32_matmul_precision(), None)
                turns.next_step()
                return next_batch(step, is_writing=is_writing)

            batches.next = paced  # type: ignore[method-assign]
            return batches

    texts = keys_of(case) | {"job.output_dir": turns.folder}
    arguments = [part for key, text in texts.items() for part in (f"--{key}", text)]
    config = load_config(ROOT / "train_configs/debug_model.toml", arguments)
    run = resolve(config, world_size=case.ranks)
    paced = PacedRun(**{field.name: getattr(run, field.name) for field in fields(run)})
    train.main(paced, RankHeartbeat({}))


def keys_of(case: Case) -> dict[str, str]:
    """Return the keys of train.py that train ``case``, besides its output folder."""
    keys = {
        "model.name": case.family,
        "model.flavor": case.flavor,
        "model.vocab_size": case.args.vocab_size,
        "training.steps": 10**6,
        "training.seq_len": case.seq_len,
        "training.local_batch_size": case.batch_size,
        "activation_checkpoint.mode": "none",
        "compile.enable": case.compile,
        "checkpoint.enable": False,
        "validation.enable": False,
        "validation.sample_tokens": 0,
        **{f"model.args.{name}": n for name, n in case.shape.items() if name != "vocab_size"},
        **case.keys,
    }
    # Weights of another dtype than float32 set the dtype of compute themselves.
    if "training.dtype" not in keys:
        keys["training.mixed_precision_param"] = case.dtype
    return {k: str(v).lower() if isinstance(v, bool) else str(v) for k, v in keys.items()}


def bare_loop(turns: Turns, case: Case, precision: str | None) -> None:
    """The same model with nothing but PyTorch around it, set up as ``train.py`` does."""
    if precision is not None:
        torch.set_float32_matmul_precision(precision)
    model = reference_model(case)
    plain_steps(turns, case, model, lambda tokens: model(tokens))


def reference_model(case: Case) -> nn.Module:
    """The model with the weights that ``train.py`` gives it, sharded if there are several ranks."""
    device = init_distributed(Comm())
    model = build_on_meta(find_model(case.family, case.flavor)[0], case.args, torch.float32)
    blocks = list(cast(nn.ModuleDict, model.layers).values())
    apply_block_attention(
        [cast(nn.Module, block.attention) for block in blocks],
        has_fast_float32=torch.get_float32_matmul_precision() == "medium",
        heads=(case.args.n_heads, case.args.n_kv_heads),
        head_dim=case.args.head_dim,
    )
    for block in blocks if case.compile else []:
        block.compile(fullgraph=True, dynamic=False)
    if case.ranks > 1:
        dtype = getattr(torch, case.dtype)
        mp_policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
        for unit in (*blocks, model):
            fully_shard(unit, mp_policy=mp_policy)
    materialize(model, device, seed=0)
    return model


def plain_steps(
    turns: Turns,
    case: Case,
    model: nn.Module,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Forward, backward, clipping and AdamW, for ever."""
    tokens, labels = batch_of(case, next(model.parameters()).device)
    optimizer = adamw(model)
    precision_of = autocast(case, tokens.device)
    make_ready(turns, case, logits_of)
    while True:
        turns.next_step()
        with precision_of():
            logits = logits_of(tokens)
        F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def make_ready(turns: Turns, case: Case, logits_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Note the model's logits for the batch, by which models are compared."""
    probe = None
    if case.ranks == 1:
        tokens, _ = batch_of(case, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        # Eager, because code compiled for this would not be the step's.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            probe = logits_of(tokens[:1])[0, -PROBED:, :PROBED].float().flatten().tolist()
    turns.note = Ready(torch.get_float32_matmul_precision(), probe)


def batch_of(case: Case, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (case.batch_size, case.seq_len + 1)
    tokens = torch.randint(256, shape, generator=generator).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """AdamW as ``optim/optimizer.py`` builds it from train.py's defaults."""
    lr, betas = 3e-5, (0.9, 0.95)
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=betas, weight_decay=0.1, fused=True)


def autocast(case: Case, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """A context that gives compute its dtype, where FSDP does not."""
    if case.ranks > 1 or case.dtype == "float32":
        return nullcontext
    return partial(torch.autocast, device.type, getattr(torch, case.dtype))
