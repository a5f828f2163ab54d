"""Ways to spread a model side by side: memory and collectives counted, time and losses measured.

Same weights, global batch and arithmetic for all modes of a case. Time is of real ranks, which take
the modes in turns. Memory and traffic are counted in one process, rank 0 of a group that sends
nothing: what gloo's threads free, no profiler sees.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn as nn
from pydantic import Field
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from benchmarks.counting import (
    MEMORY,
    Counts,
    count_collectives,
    count_memory,
    held_bytes,
    mark,
    profiled,
)
from benchmarks.rows import Row
from benchmarks.turns import Loop, Turn, Turns
from build_model import build_sharded_model
from config import JobConfig
from config.job_config import (
    ActivationCheckpoint,
    Comm,
    Compile,
    Count,
    Optimizer,
    Parallelism,
    Section,
    Training,
)
from data.loader import Microbatch
from forward_backward import SPMDRunner
from models import TransformerArgs, find_model
from models.meta import build_on_meta
from models.transformer import TransformerBlock
from optim.grad_norm import clip_grad_norm_
from optim.optimizer import build_optimizer
from parallelisms.comm_volume import step_comm_volume
from parallelisms.materialize import materialize
from parallelisms.mixed_precision import mixed_precision_policy
from parallelisms.parallel_dims import ParallelDims, resolve_degrees
from runtime.compat import require
from runtime.distributed import init_distributed

MAX_NORM = 1.0
SPEC, FLAVOR = find_model("llama3", "debugmodel")
MIB = 2**20
WARMUP_TURNS = 2


class Mode(Section):
    """One way to spread a model, by what sets it apart from the others of its case."""

    name: str
    kind: Literal["ours", "one device", "FSDP1"] = "ours"
    """one device: rank 0 alone, with the whole global batch. FSDP1: PyTorch's own, to compare."""
    parallelism: dict[str, str | int] = Field(default_factory=dict)
    """Keys of our TOML table."""
    shape: dict[str, int] = Field(default_factory=dict)
    """Fields of TransformerArgs."""
    compile: bool = False

    @property
    def settings(self) -> Parallelism:
        return Parallelism(**self.parallelism)  # type: ignore[arg-type]


class Case(Section):
    modes: list[Mode]
    ranks: Count
    shape: dict[str, int]
    microbatches: Count = 1
    """Each has one sequence on each rank."""
    turns: Count
    limit_seconds: Count = 300

    def args(self, mode: Mode) -> TransformerArgs:
        return replace(FLAVOR, **{**self.shape, **mode.shape})  # type: ignore[arg-type]


def run(case: Case) -> Iterator[Row]:
    deadline = time.monotonic() + case.limit_seconds
    # First, because it fills the compiler's cache.
    with Loop(count_modes, case, deadline=deadline) as loop:
        counts = [loop.turn().note for _ in case.modes]
    turns: list[list[Turn]] = [[] for _ in case.modes]
    with Loop(time_modes, case, ranks=case.ranks, deadline=deadline) as loop:
        for _ in range(WARMUP_TURNS + case.turns):
            for found in turns:
                found.append(loop.turn())
    for mode, found, (count, form) in zip(case.modes, turns, counts, strict=True):
        losses = [turn.note for turn in found]
        seconds = statistics.median(turn.seconds for turn in found[WARMUP_TURNS:])
        n_tokens = case.microbatches * case.ranks * case.args(mode).max_seq_len
        calls = {f"{k}_calls": n or None for k, n in count.calls.items() if k != "scalar"}
        sent = {f"{k}_mib": n / MIB or None for k, n in count.sent.items() if k != "scalar"}
        yield {
            "what": mode.name,
            "tokens_per_second": n_tokens / seconds,
            "step_seconds": seconds,
            "first_step_seconds": found[0].seconds,
            "loss_first": losses[0],
            "loss_last": losses[-1],
            "peak_mib": count.peak / MIB,
            **{f"{kind}_mib": getattr(count, kind) / MIB for kind in MEMORY},
            **calls,
            **sent,
            "sent_mib": sum(count.sent.values()) / MIB,
            "closed_form_mib": form and form / MIB,
            "allocator_mib": count.allocator and count.allocator / MIB,
        }


def time_modes(turns: Turns, case: Case) -> None:
    """All modes in turn, on real ranks."""
    device = init_distributed(Comm())
    is_first = dist.get_rank() == 0
    trainees = [
        build(mode, case.args(mode), device, microbatches=case.microbatches)
        if is_first or mode.kind != "one device"
        else None
        for mode in case.modes
    ]
    while True:
        for mode, trainee in zip(case.modes, trainees, strict=True):
            turns.next_step()
            if trainee is not None:
                loss = trainee.step().double()
                if mode.kind != "one device":
                    dist.all_reduce(loss)
                turns.note = loss.item()


def count_modes(turns: Turns, case: Case) -> None:
    """Count each mode once, as rank 0 of a group that sends nothing."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fake = require("torch.testing._internal.distributed.fake_pg:FakeStore", key="benchmark")
    dist.init_process_group("fake", store=fake(), rank=0, world_size=case.ranks)
    for mode in case.modes:
        turns.next_step()
        torch.compiler.reset()
        gc.collect()
        count = count_mode(mode, case.args(mode), device, microbatches=case.microbatches)
        turns.note = count, closed_form(mode, case, device)
    turns.next_step()


@dataclass
class Trainee:
    """One rank's model, and its step, which returns its share of the loss."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], torch.Tensor]


def build(mode: Mode, args: TransformerArgs, device: torch.device, *, microbatches: int) -> Trainee:
    """The model of ``mode`` for this rank of the default group, with weights."""
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    config = JobConfig(
        training=training_of(device),
        parallelism=mode.settings,
        compile=Compile(enable=mode.compile),
        activation_checkpoint=ActivationCheckpoint(mode="none"),
    )
    mp_policy = precision(device)
    if mode.kind == "ours":
        dims = ParallelDims.build(config.parallelism, n_ranks, device.type)
        sharded = build_sharded_model(SPEC, args, config, dims, device)
        sharded.materialize()
        model, runner = sharded.module, sharded.runner()
    else:
        model = build_on_meta(SPEC, args, torch.float32)
        materialize(model, device, seed=0)
    clip: Callable[[float], Any] = partial(clip_grad_norm_, list(model.parameters()))
    scale = 1
    if mode.kind == "FSDP1":
        model = apply_fsdp1(model, device, mp_policy)
        # FSDP1 averages gradients where we sum them.
        clip, scale = model.clip_grad_norm_, n_ranks
    # FSDP1's parameters are flat, so no rule tells its matrices from its norms.
    optimizer = build_optimizer(model, Optimizer(weight_decay=0.0))
    is_alone = mode.kind == "one device"
    rows = slice(None) if is_alone else slice(rank, rank + 1)
    batches = rows_of_batch(args, (microbatches, n_ranks), rows)
    n_tokens = microbatches * n_ranks * args.max_seq_len
    model.register_forward_pre_hook(lambda *_: mark("forward begins"))
    model.register_forward_hook(lambda *_: mark("forward ends"))
    if mode.kind != "ours":
        runner = SPMDRunner(
            model, parallelism=config.parallelism, compile=config.compile, device=device
        )
    needs_autocast = is_alone and device.type == "cuda"

    def step() -> torch.Tensor:
        with torch.autocast(device.type, mp_policy.param_dtype, enabled=needs_autocast):
            loss = runner.forward_backward(batches, n_tokens // scale).sum()
        mark("backward ends")
        clip(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss / scale

    return Trainee(model, optimizer, step)


def training_of(device: torch.device) -> Training:
    return Training(mixed_precision_param="bfloat16" if device.type == "cuda" else "float32")


def precision(device: torch.device) -> MixedPrecisionPolicy:
    return mixed_precision_policy(training_of(device), device)


def apply_fsdp1(
    model: nn.Module, device: torch.device, mp_policy: MixedPrecisionPolicy
) -> FullyShardedDataParallel:
    blocks: set[type[nn.Module]] = {TransformerBlock}
    return FullyShardedDataParallel(
        model,
        device_id=device,
        auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls=blocks),
        mixed_precision=MixedPrecision(mp_policy.param_dtype, mp_policy.reduce_dtype),
        use_orig_params=True,
    )


def rows_of_batch(args: TransformerArgs, size: tuple[int, int], rows: slice) -> list[Microbatch]:
    """These rows of the global batch; ``size``: microbatches and ranks, a row for each pair."""
    generator = torch.Generator().manual_seed(0)
    shape = (*size, args.max_seq_len + 1)
    tokens = torch.randint(args.vocab_size, shape, generator=generator)[:, rows]
    return [Microbatch(part[:, :-1], part[:, 1:]) for part in tokens]


def count_mode(
    mode: Mode, args: TransformerArgs, device: torch.device, *, microbatches: int
) -> Counts:
    """Profile the second step, when the optimizer has its state and compilers are done."""
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    trainee = build(mode, args, device, microbatches=microbatches)
    trainee.step()
    events = profiled(trainee.step)
    states = trainee.optimizer.state.values()
    gradients, rest = count_memory(events, device)
    degrees = resolve_degrees(mode.settings, dist.get_world_size())
    calls, sent = count_collectives(events, degrees)
    return Counts(
        parameters=held_bytes(trainee.model.parameters()),
        gradients=gradients,
        optimizer=held_bytes(tensor for state in states for tensor in state.values()),
        rest=rest + held_bytes(trainee.model.buffers()),
        calls=calls,
        sent=sent,
        allocator=torch.cuda.max_memory_allocated() if is_cuda else None,
    )


def closed_form(mode: Mode, case: Case, device: torch.device) -> float | None:
    """Bytes that a rank sends in a step, as ``train.py`` estimates them."""
    if mode.kind != "ours":
        return None
    degrees = resolve_degrees(mode.settings, case.ranks)
    traffic = step_comm_volume(
        mode.settings,
        precision(device),
        n_parameters=sum(
            p.numel() for p in build_on_meta(SPEC, case.args(mode), torch.float32).parameters()
        ),
        n_shards=degrees.dp_shard,
        n_replicas=degrees.dp_replicate,
        n_microbatches=case.microbatches,
    )
    return sum(asdict(traffic).values())
