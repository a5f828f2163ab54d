"""The data-parallel modes side by side: ``python -m benchmarks.data_parallel [--ranks N]``

Same weights, global batch and arithmetic for all. Speed and losses are of real ranks. Memory and
traffic are counted in one process, rank 0 of a group that sends nothing: what gloo's threads free,
no profiler sees.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.counting import (
    MEMORY,
    Counts,
    count_collectives,
    count_memory,
    held_bytes,
    mark,
    profiled,
)
from config.job_config import ActivationCheckpoint, Compile, Optimizer, Parallelism, Training
from data.loader import Batch
from forward_backward import WholeModel
from models import TransformerArgs, find_model
from models.meta import build_on_meta
from models.transformer import TransformerBlock
from optim.grad_norm import clip_grad_norm_
from optim.optimizer import build_optimizer
from parallelisms.materialize import materialize
from parallelisms.mixed_precision import mixed_precision_policy
from parallelisms.parallel_dims import ParallelDims, resolve_degrees
from parallelisms.parallelize import parallelize
from parallelisms.traffic import step_traffic

ARGS = TransformerArgs(
    dim=512, n_layers=4, n_heads=8, n_kv_heads=4, head_dim=64, hidden_dim=1536, vocab_size=4096,
    max_seq_len=128,
)  # fmt: skip
MICROBATCHES = 2
STEPS, WARMUP_STEPS = 5, 2
MAX_NORM = 1.0
SPEC, _ = find_model("llama3", "debugmodel")
MIB = 2**20


@dataclass(frozen=True, eq=False)
class Mode:
    name: str
    parallelism: dict[str, Any] | None = None
    """Keys of our TOML table; None: PyTorch's own, without us."""
    is_fsdp1: bool = False
    is_compiled: bool = False

    @property
    def is_alone(self) -> bool:
        return self.parallelism is None and not self.is_fsdp1

    @property
    def settings(self) -> Parallelism:
        return Parallelism(**self.parallelism or {})


def modes(n_ranks: int) -> list[Mode]:
    simple, reshard = {"data_parallel": "simple_fsdp"}, "fsdp_reshard_after_forward"
    last = {"fsdp_reduce_gradients": "last_microbatch"}
    found = [
        Mode("one device"),
        Mode("DDP", {"data_parallel": "ddp"}),
        Mode("FSDP1", is_fsdp1=True),
        Mode("FSDP2", {}),
        Mode("FSDP2, always", {reshard: "always"}),
        Mode("FSDP2, never", {reshard: "never"}),
        Mode("FSDP2, never, last microbatch", {reshard: "never"} | last),
        Mode("FSDP2, compiled", {}, is_compiled=True),
        Mode("SimpleFSDP", simple),
        Mode("SimpleFSDP, never", simple | {reshard: "never"}),
        Mode("SimpleFSDP, compiled", simple, is_compiled=True),
    ]
    if n_ranks > 2 and n_ranks % 2 == 0:
        found.insert(6, Mode("FSDP2, reshard to 2", {reshard: 2}))
        replicate = {"data_parallel_replicate_degree": 2}
        found.insert(8, Mode(f"HSDP, 2 x {n_ranks // 2}", replicate))
    return found


@dataclass
class Trainee:
    """One rank's model, and its step, which returns the rank's part of the loss."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], torch.Tensor]


def build(mode: Mode, args: TransformerArgs, device: torch.device) -> Trainee:
    """The model of ``mode`` for this rank of the default group, with weights."""
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    model = build_on_meta(SPEC, args, torch.float32)
    mp_policy = precision(device)
    parallelism = mode.settings
    if mode.parallelism is not None:
        parallelize(
            model,
            ParallelDims.build(parallelism, n_ranks, device.type),
            facts=SPEC,
            parallelism=parallelism,
            activation_checkpoint=ActivationCheckpoint(mode="none"),
            compile=Compile(enable=mode.is_compiled),
            mp_policy=mp_policy,
        )
    materialize(model, device, seed=0)
    clip: Callable[[float], Any] = partial(clip_grad_norm_, list(model.parameters()))
    scale = 1
    if mode.is_fsdp1:
        model = apply_fsdp1(model, device, mp_policy)
        # It averages gradients where we sum them.
        clip, scale = model.clip_grad_norm_, n_ranks
    # FSDP1's parameters are flat, so no rule tells its matrices from its norms.
    optimizer = build_optimizer(model, Optimizer(weight_decay=0.0))
    rows = slice(None) if mode.is_alone else slice(rank, rank + 1)
    batches = microbatches(args, n_ranks, rows)
    n_tokens = MICROBATCHES * n_ranks * args.max_seq_len
    model.register_forward_pre_hook(lambda *_: mark("forward begins"))
    model.register_forward_hook(lambda *_: mark("forward ends"))
    runner = WholeModel(model, parallelism=parallelism, device=device)
    needs_autocast = mode.is_alone and device.type == "cuda"

    def step() -> torch.Tensor:
        with torch.autocast(device.type, mp_policy.param_dtype, enabled=needs_autocast):
            loss = runner.train(batches, n_tokens // scale).sum()
        mark("backward ends")
        clip(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss / scale

    return Trainee(model, optimizer, step)


def precision(device: torch.device) -> MixedPrecisionPolicy:
    compute: Literal["bfloat16", "float32"] = "bfloat16" if device.type == "cuda" else "float32"
    return mixed_precision_policy(Training(mixed_precision_param=compute), device)


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


def microbatches(args: TransformerArgs, n_ranks: int, rows: slice) -> list[Batch]:
    """These rows of the global batch, which has a row per rank and microbatch."""
    generator = torch.Generator().manual_seed(0)
    shape = (MICROBATCHES, n_ranks, args.max_seq_len + 1)
    tokens = torch.randint(args.vocab_size, shape, generator=generator)[:, rows]
    return [Batch(part[:, :-1], part[:, 1:], None, None) for part in tokens]


@dataclass
class Speed:
    tokens_per_second: float
    first_loss: float
    final_loss: float


def time_modes(rank: int, n_ranks: int, store: str, answers: "SimpleQueue[Speed]") -> None:
    """Run all modes on real ranks; rank 0 answers.

    They take turns step by step, so that whatever else the machine does slows all.
    """
    device = this_device(rank)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=n_ranks)
    turns = modes(n_ranks)
    trainees = {m: build(m, ARGS, device) for m in turns if rank == 0 or not m.is_alone}
    n_tokens = MICROBATCHES * n_ranks * ARGS.max_seq_len
    seconds: dict[Mode, list[float]] = defaultdict(list)
    losses: dict[Mode, list[torch.Tensor]] = defaultdict(list)
    for _ in range(STEPS):
        for mode in turns:
            dist.barrier()
            if mode in trainees:
                begin = time.perf_counter()
                losses[mode].append(trainees[mode].step().double())
                # The host waits for the device.
                losses[mode][-1].item()
                seconds[mode].append(time.perf_counter() - begin)
    for mode in trainees:
        total = torch.stack([losses[mode][0], losses[mode][-1]])
        if not mode.is_alone:
            dist.all_reduce(total)
        if rank == 0:
            median = statistics.median(seconds[mode][WARMUP_STEPS:])
            answers.put(Speed(n_tokens / median, *total.tolist()))
    dist.destroy_process_group()


def this_device(rank: int) -> torch.device:
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def count_modes(rank: int, n_ranks: int, answers: "SimpleQueue[Counts]") -> None:
    """Count each mode as rank 0 of a group that sends nothing."""
    device = this_device(rank)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=n_ranks)
    for mode in modes(n_ranks):
        torch._dynamo.reset()
        gc.collect()
        answers.put(count_mode(mode, ARGS, device))
    dist.destroy_process_group()


def count_mode(mode: Mode, args: TransformerArgs, device: torch.device) -> Counts:
    """Profile the second step: the optimizer has its state then, and compilers are done."""
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    trainee = build(mode, args, device)
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


def closed_form(mode: Mode, n_ranks: int, device: torch.device) -> float | None:
    """Bytes that a rank sends in a step, as ``train.py`` estimates them."""
    if mode.is_alone or mode.is_fsdp1:
        return None
    degrees = resolve_degrees(mode.settings, n_ranks)
    traffic = step_traffic(
        mode.settings,
        precision(device),
        n_parameters=sum(p.numel() for p in build_on_meta(SPEC, ARGS, torch.float32).parameters()),
        n_shards=degrees.dp_shard,
        n_replicas=degrees.dp_replicate,
        microbatches=MICROBATCHES,
    )
    return sum(asdict(traffic).values())


def table(records: list[dict[str, Any]]) -> str:
    """Markdown; memory and traffic in MiB per rank, collectives as calls: MiB."""
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    totals = ["sent", "closed form", *["allocator"] * (records[0]["allocator"] is not None)]
    names = ["mode", "tokens/s", "loss 1", f"loss {STEPS}", "peak", *MEMORY]
    names += [*(kind.replace("_", "-") for kind in kinds), *totals]
    lines = [names, ["---", *["---:"] * (len(names) - 1)]]
    for r in records:
        sent, calls = r["sent"], r["calls"]
        sizes = (sum(sent.values()), r["closed_form"], r["allocator"])
        lines.append(
            [r["mode"], f"{r['tokens_per_second']:,.0f}"]
            + [f"{r[key]:.8f}" for key in ("first_loss", "final_loss")]
            + [f"{r[key] / MIB:.1f}" for key in ("peak", *MEMORY)]
            + [f"{calls[k]}: {sent[k] / MIB:.1f}" if calls[k] else "" for k in kinds]
            + ["" if size is None else f"{size / MIB:.1f}" for size in sizes[: len(totals)]]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    # Behind it is an optional package, which should be missed before minutes of work.
    from tools.plot import draw_modes

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_cuda = device.type == "cuda"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() if is_cuda else 4)
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks/data_parallel"))
    options = parser.parse_args()
    if options.ranks < 2:
        parser.error("--ranks: there is nothing to compare on one rank")
    options.output.mkdir(parents=True, exist_ok=True)
    records = compare(options.ranks, device)
    machine = torch.cuda.get_device_name() if is_cuda else f"{os.cpu_count()} CPUs"
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    where = f"{options.ranks} ranks on {machine}, {versions}, {platform.platform()}"
    lines = [json.dumps(record | {"where": where}) + "\n" for record in records]
    (options.output / "modes.jsonl").write_text("".join(lines))
    draw_modes(records, MEMORY, options.output / "modes.png")
    print(f"`python -m benchmarks.data_parallel --ranks {options.ranks}`: {where}\n")
    print(table(records))
    reference, tolerance = records[0]["first_loss"], 1e-2 if is_cuda else 1e-6
    for record in records:
        difference = abs(record["first_loss"] / reference - 1)
        assert difference < tolerance, f"{record['mode']}: the first loss is off by {difference}"


def compare(n_ranks: int, device: torch.device) -> list[dict[str, Any]]:
    """A record for each mode: what is counted, then what is timed."""
    counts, speeds = (get_context("spawn").SimpleQueue() for _ in range(2))
    spawn = torch.multiprocessing.spawn
    # First, for it fills the compiler's cache.
    spawn(count_modes, (n_ranks, counts), nprocs=1)
    with tempfile.TemporaryDirectory() as folder:
        spawn(time_modes, (n_ranks, f"{folder}/store", speeds), nprocs=n_ranks)
    records = []
    for mode in modes(n_ranks):
        count, speed = counts.get(), speeds.get()
        form = closed_form(mode, n_ranks, device)
        derived = {"mode": mode.name, "peak": count.peak, "closed_form": form}
        records.append(derived | asdict(count) | asdict(speed))
    return records


if __name__ == "__main__":
    main()
