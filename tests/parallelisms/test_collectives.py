"""What tensor, context and pipeline parallelism send in a step is what a closed form says."""

from collections import Counter
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from benchmarks.counting import operand_bytes, profiled
from config.job_config import ActivationCheckpoint
from data.loader import Batch
from models import TransformerArgs, find_model
from optim import loss
from parallelisms.materialize import materialize
from tests.layouts import CP, CPU, METHOD, PP, SCHEDULE, TP, Layout, spread
from tests.ranks import RankPool

ROWS, SEQ_LEN, MICROBATCHES, BYTES = 1, 32, 4, 4
SHORT_NAMES = {
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::send": "send",
    "c10d::recv_": "receive",
}
# FSDP's own, of weights: tests/benchmarks/test_sharding.py counts them.
OF_WEIGHTS = {"c10d::_allgather_base_", "c10d::_reduce_scatter_base_"}
# What: bytes of the whole (of what one rank puts in, where nothing is a part): calls.
Calls = Counter[tuple[str, int]]


def args_of(n_layers: int) -> TransformerArgs:
    args = find_model("llama3", "debugmodel")[1]
    return replace(args, n_layers=n_layers, dim=64, head_dim=16, max_seq_len=SEQ_LEN)


def count(layout: Layout, n_layers: int) -> Calls:
    model = spread("llama3", args_of(n_layers), layout, compute_dtype="float32")
    materialize(model.model, CPU, seed=1)
    runner = model.runner()
    tokens = torch.randint(300, (ROWS, SEQ_LEN))
    microbatches = [Batch(tokens, tokens)] * MICROBATCHES

    def step() -> None:
        # A row of logits at a time.
        with patch.object(loss, "CPU_CHUNK", 1):
            runner.train(microbatches, ROWS * SEQ_LEN * MICROBATCHES)

    step()
    calls: Calls = Counter()
    for event in profiled(step):
        if event.name.startswith("c10d::") and event.name not in OF_WEIGHTS:
            size = max(operand_bytes(operand) for operand in event.extra_fields.inputs[:2])
            calls[SHORT_NAMES[event.name], size] += 1
    return calls


def of_tensor_parallel(args: TransformerArgs, layers: int, tp: int, cp: int = 1) -> Calls:
    """Megatron-LM's count (arXiv 2205.05198): a gather before each pair of matrices, a scatter
    after it, and the reverse in backward. The embedding only scatters, the output only gathers."""
    positions = ROWS * SEQ_LEN // cp
    hidden, pairs = BYTES * positions * args.dim, 2 * layers + 1
    calls: Calls = Counter()
    for kind in ("all_gather", "reduce_scatter"):
        calls[kind, hidden] = 2 * pairs
        if args.n_kv_heads < tp:
            # Keys and values of all heads, forward; their gradients, backward.
            calls[kind, BYTES * positions * args.n_kv_heads * args.head_dim] = 2 * layers
    # Of each norm, a gradient.
    calls["all_reduce", BYTES * args.dim] = pairs
    # Of each token its greatest logit; its sum of exponentials and its label's. Logits stay.
    calls["all_reduce", BYTES * positions] += 1
    calls["all_reduce", 2 * BYTES * positions] += 1
    return calls


def of_ulysses(args: TransformerArgs, layers: int, cp: int, tp: int = 1) -> Calls:
    """Queries, keys and values there, what attention makes of them back; and the gradients."""
    heads, kv_heads = args.n_heads // tp, max(args.n_kv_heads // tp, cp)
    size = BYTES * ROWS * SEQ_LEN // cp * args.head_dim
    calls: Calls = Counter()
    calls["all_to_all", (heads + 2 * kv_heads) * size] += 2 * layers
    calls["all_to_all", heads * size] += 2 * layers
    return calls


def of_allgather(args: TransformerArgs, layers: int, tp: int = 1) -> Calls:
    whole = 2 * BYTES * ROWS * SEQ_LEN * args.n_kv_heads // tp * args.head_dim
    return Counter({("all_gather", whole): layers, ("reduce_scatter", whole): layers})


def of_a_stage(args: TransformerArgs, neighbours: int, parts: int = 1) -> Calls:
    """To and from each stage beside it, hidden states one way and gradients the other."""
    hidden = BYTES * ROWS * SEQ_LEN * args.dim // parts
    return Counter({("send", hidden): neighbours, ("receive", hidden): neighbours})


GATHER = {METHOD: "allgather"}


def expected(layout: Layout, n_layers: int, rank: int) -> Calls:
    """Of one microbatch."""
    args, keys = args_of(n_layers), layout.parallelism
    tp, cp, pp = (keys.get(key, 1) for key in (TP, CP, PP))
    calls: Calls = Counter()
    layers = n_layers // pp
    if pp > 1:
        stages = 2 if SCHEDULE in keys else 1
        place = rank // (layout.world_size // pp)
        # The first and the last stage of all have one neighbour.
        ends = (place == 0) + (place == pp - 1)
        calls += of_a_stage(args, 2 * stages - ends, parts=tp * cp)
    if tp > 1:
        assert pp == 1, "a stage has not all of it"
        calls += of_tensor_parallel(args, layers, tp, cp)
    if cp > 1:
        is_ulysses = METHOD not in keys
        calls += of_ulysses(args, layers, cp, tp) if is_ulysses else of_allgather(args, layers, tp)
    return calls


@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, {TP: 2}),
        Layout(4, {TP: 4}),
        Layout(2, {CP: 2}),
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
def test_a_step_sends_what_the_closed_form_says(ranks: RankPool, layout: Layout) -> None:
    # As few as there are stages, and twice as many.
    fewest = 4 if PP in layout.parallelism else 2
    for n_layers in (fewest, 2 * fewest):
        found = ranks.run(count, layout.world_size, layout, n_layers)
        for rank, calls in enumerate(found):
            wanted = expected(layout, n_layers, rank)
            assert calls == {key: MICROBATCHES * n for key, n in wanted.items()}, f"rank {rank}"


def test_recomputation_keeps_what_collectives_brought(ranks: RankPool) -> None:
    """Of Ulysses and of the scatters of tensor parallelism; keys are gathered again, which are
    those of the whole sequence."""
    op = ActivationCheckpoint(mode="selective")
    for keys, again in (({CP: 2}, {}), ({CP: 2} | GATHER, {"all_gather": 2})):
        layout = Layout(2, keys, recompute=op)
        calls = ranks.run(count, 2, layout, 2)[0]
        wanted = expected(layout, 2, 0)
        for (kind, size), n in wanted.items():
            assert calls[kind, size] == MICROBATCHES * (n + again.get(kind, 0))
