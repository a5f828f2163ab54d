"""Tests the collectives of tensor, context and pipeline parallelism against closed forms."""

from collections import Counter
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from benchmarks.counting import operand_bytes, profiled
from config.job_config import ActivationCheckpoint
from data.loader import Microbatch
from models import TransformerArgs, find_model
from optim import loss
from parallelisms.materialize import materialize
from tests.lib.layouts import CP, CPU, METHOD, PP, SCHEDULE, TP, Layout, shard_debugmodel
from tests.lib.ranks import RankPool

ROWS, SEQ_LEN, BYTES = 1, 32, 4
SHORT_NAMES = {
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::send": "send",
    "c10d::recv_": "receive",
}
# FSDP's collectives, which tests/benchmarks/test_sharding.py counts.
FSDP_COLLECTIVES = {"c10d::_allgather_base_", "c10d::_reduce_scatter_base_"}
# Calls by collective and bytes: those of the unsharded tensor, or of one rank's all-to-all or P2P.
Calls = Counter[tuple[str, int]]


def args_of(n_layers: int) -> TransformerArgs:
    args = find_model("llama3", "debugmodel")[1]
    return replace(args, n_layers=n_layers, dim=64, head_dim=16, max_seq_len=SEQ_LEN)


def microbatches_of(layout: Layout) -> int:
    # 1F1B needs one per stage.
    return 4 if PP in layout.parallelism else 2


def counts(layout: Layout, depths: list[int]) -> list[Calls]:
    """Calls with each number of layers."""
    return [count(layout, n_layers) for n_layers in depths]


def count(layout: Layout, n_layers: int) -> Calls:
    sharded = shard_debugmodel("llama3", args_of(n_layers), layout, compute_dtype="float32")
    materialize(sharded.module, CPU, seed=1)
    runner = sharded.runner()
    tokens = torch.randint(300, (ROWS, SEQ_LEN))
    microbatches = [Microbatch(tokens, tokens)] * microbatches_of(layout)

    def step() -> None:
        # The loss runs on one row of logits at a time.
        with patch.object(loss, "CPU_CHUNK", 1):
            runner.forward_backward(microbatches, ROWS * SEQ_LEN * len(microbatches))

    step()
    calls: Calls = Counter()
    for event in profiled(step):
        if event.name.startswith("c10d::") and event.name not in FSDP_COLLECTIVES:
            size = max(operand_bytes(operand) for operand in event.extra_fields.inputs[:2])
            calls[SHORT_NAMES[event.name], size] += 1
    return calls


def tensor_parallel_calls(args: TransformerArgs, layers: int, tp: int, cp: int = 1) -> Calls:
    """Megatron-LM's count (arXiv 2205.05198).

    An all-gather before each pair of matmuls, a reduce-scatter after it, and the reverse in
    backward. The embedding only scatters, the output only gathers.
    """
    positions = ROWS * SEQ_LEN // cp
    hidden, pairs = BYTES * positions * args.dim, 2 * layers + 1
    calls: Calls = Counter()
    for kind in ("all_gather", "reduce_scatter"):
        calls[kind, hidden] = 2 * pairs
        if args.n_kv_heads < tp:
            # Keys and values of all heads in forward, their gradients in backward.
            calls[kind, BYTES * positions * args.n_kv_heads * args.head_dim] = 2 * layers
    # One gradient per norm.
    calls["all_reduce", BYTES * args.dim] = pairs
    # Per token the maximum logit, then the sum of exponentials and the label's logit.
    calls["all_reduce", BYTES * positions] += 1
    calls["all_reduce", 2 * BYTES * positions] += 1
    return calls


def ulysses_calls(args: TransformerArgs, layers: int, cp: int, tp: int = 1) -> Calls:
    """Q, K and V before attention, its output after it, and their gradients."""
    heads, kv_heads = args.n_heads // tp, max(args.n_kv_heads // tp, cp)
    size = BYTES * ROWS * SEQ_LEN // cp * args.head_dim
    calls: Calls = Counter()
    calls["all_to_all", (heads + 2 * kv_heads) * size] += 2 * layers
    calls["all_to_all", heads * size] += 2 * layers
    return calls


def allgather_calls(args: TransformerArgs, layers: int, tp: int = 1) -> Calls:
    whole = 2 * BYTES * ROWS * SEQ_LEN * args.n_kv_heads // tp * args.head_dim
    return Counter({("all_gather", whole): layers, ("reduce_scatter", whole): layers})


def pipeline_calls(args: TransformerArgs, neighbours: int, shards: int = 1) -> Calls:
    """Hidden states one way and gradients the other, for each neighbouring stage."""
    hidden = BYTES * ROWS * SEQ_LEN * args.dim // shards
    return Counter({("send", hidden): neighbours, ("receive", hidden): neighbours})


GATHER = {METHOD: "allgather"}


def expected(layout: Layout, n_layers: int, rank: int) -> Calls:
    """Return the calls of one microbatch on ``rank``."""
    args, keys = args_of(n_layers), layout.parallelism
    tp, cp, pp = (keys.get(key, 1) for key in (TP, CP, PP))
    calls: Calls = Counter()
    layers = n_layers // pp
    if pp > 1:
        stages = 2 if SCHEDULE in keys else 1
        pp_rank = rank // (layout.world_size // pp)
        # The first and the last stage have one neighbour.
        ends = (pp_rank == 0) + (pp_rank == pp - 1)
        calls += pipeline_calls(args, 2 * stages - ends, shards=tp * cp)
    if tp > 1:
        assert pp == 1, "the closed form is of a whole model"
        calls += tensor_parallel_calls(args, layers, tp, cp)
    if cp > 1:
        is_ulysses = METHOD not in keys
        calls += (
            ulysses_calls(args, layers, cp, tp) if is_ulysses else allgather_calls(args, layers, tp)
        )
    return calls


@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, {TP: 2}),
        Layout(4, {TP: 4}),
        Layout(2, {CP: 2} | GATHER),
        Layout(4, {CP: 4}),
        Layout(4, {CP: 2, TP: 2}),
        Layout(4, {CP: 2, TP: 2} | GATHER),
        Layout(2, {PP: 2}),
        Layout(4, {PP: 4}),
        Layout(2, {PP: 2, SCHEDULE: "Interleaved1F1B"}),
        Layout(4, {PP: 2, CP: 2}),
    ],
    ids=str,
)
def test_step_collectives_match_closed_form(ranks: RankPool, layout: Layout) -> None:
    # As many layers as stages, and twice as many.
    fewest = layout.parallelism.get(PP, 1) * (2 if SCHEDULE in layout.parallelism else 1)
    n_microbatches = microbatches_of(layout)
    depths = [fewest, 2 * fewest]
    for rank, found in enumerate(ranks.run(counts, layout.world_size, layout, depths)):
        for n_layers, calls in zip(depths, found, strict=True):
            wanted = expected(layout, n_layers, rank)
            assert calls == {key: n_microbatches * n for key, n in wanted.items()}, f"rank {rank}"


def test_recompute_repeats_only_kv_all_gathers(ranks: RankPool) -> None:
    """Recomputation keeps the results of Ulysses' all-to-alls, but gathers K and V again."""
    op = ActivationCheckpoint(mode="selective")
    for keys, again in (({CP: 2}, {}), ({CP: 2} | GATHER, {"all_gather": 2})):
        layout = Layout(2, keys, recompute=op)
        calls = ranks.run(count, 2, layout, 2)[0]
        wanted = expected(layout, 2, 0)
        for (kind, size), n in wanted.items():
            assert calls[kind, size] == microbatches_of(layout) * (n + again.get(kind, 0))
