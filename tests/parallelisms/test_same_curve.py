"""In float32 and bfloat16, where rounding shows: which modes give the very same numbers."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from config.job_config import ActivationCheckpoint, Compile, Optimizer, Parallelism
from data.loader import Batch, count_valid
from forward_backward import WholeModel
from models import find_model
from optim.grad_norm import clip_grad_norm_
from optim.optimizer import build_optimizer
from parallelisms.materialize import materialize
from runtime.distributed import sum_over
from tests.layouts import CPU, MODE, REPLICATE, RESHARD, TP, Layout, build_sharded
from tests.ranks import RankPool

STEPS, ROWS, SEQ_LEN = 20, 2, 32
AOT_EAGER = Compile(enable=True, backend="aot_eager")
SIMPLE = {MODE: "simple_fsdp"}


def curve(
    name: str, is_tied: bool, layout: Layout, compute_dtype: str, microbatches: int
) -> list[tuple[float, float]]:
    """Loss and gradient norm of each of ``STEPS`` steps on changing data."""
    # What earlier tests compiled in these processes counts toward a limit.
    torch.compiler.reset()
    args = find_model(name, "debugmodel")[1]
    args = replace(args, n_layers=2, max_seq_len=SEQ_LEN, tie_embeddings=is_tied)
    if TP not in layout.parallelism:
        # Divides by nothing.
        args = replace(args, vocab_size=331)
    model, dims = build_sharded(name, args, layout, compute_dtype=compute_dtype)
    materialize(model, CPU, seed=7)
    parameters = list(model.parameters())
    optimizer = build_optimizer(model, Optimizer(lr=1e-2))
    parallelism = Parallelism(**layout.parallelism)
    runner = WholeModel(model, parallelism=parallelism, device=CPU)
    generator = torch.Generator().manual_seed(dims.batch_mesh.get_local_rank())
    found = []
    for _ in range(STEPS):
        tokens = torch.randint(300, (microbatches, ROWS, SEQ_LEN + 1), generator=generator)
        batches = [Batch(rows[:, :-1], rows[:, 1:]) for rows in tokens]
        n_tokens = int(sum_over(torch.tensor(count_valid(batches)), dims.batch_mesh))
        loss = runner.train(batches, n_tokens).sum()
        norm = clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((sum_over(loss, dims.batch_mesh).item(), norm.item()))
    return found


def both_curves(
    ranks: RankPool, name: str, is_tied: bool, layout: Layout, compute_dtype: str, microbatches: int
) -> list[list[tuple[float, float]]]:
    """FSDP2's and SimpleFSDP's."""
    layouts = (layout, replace(layout, parallelism=layout.parallelism | SIMPLE))
    arguments = (compute_dtype, microbatches)
    return [
        ranks.run(curve, each.world_size, name, is_tied, each, *arguments)[0] for each in layouts
    ]


CASES: list[tuple[Layout, int, str]] = [
    (Layout(1), 2, "float32"),
    (Layout(2), 2, "float32"),
    (Layout(2), 2, "bfloat16"),
    (Layout(4, {REPLICATE: 2}), 1, "float32"),
    (Layout(4, {TP: 2}), 1, "float32"),
]


@pytest.mark.parametrize(
    ("name", "is_tied", "layout", "microbatches", "compute_dtype"),
    [
        *(("llama3", False, *case) for case in CASES),
        ("qwen3", True, *CASES[1]),
        *(pytest.param("qwen3", True, *case, marks=pytest.mark.slow) for case in CASES[2:]),
    ],
    ids=str,
)
def test_simple_fsdp_is_fsdp2_bit_for_bit(
    ranks: RankPool, name: str, is_tied: bool, layout: Layout, microbatches: int, compute_dtype: str
) -> None:
    want, got = both_curves(ranks, name, is_tied, layout, compute_dtype, microbatches)
    assert len(set(want)) == STEPS
    assert got == want


@pytest.mark.parametrize(
    ("layout", "microbatches"),
    [
        # Where gloo's chunks end depends on what else is in the buffer, and with it the order in
        # which three or more ranks are added.
        (Layout(3), 2),
        # FSDP2 adds microbatches before replicas, SimpleFSDP replicas before microbatches.
        (Layout(4, {REPLICATE: 2}), 2),
    ],
    ids=str,
)
def test_simple_fsdp_is_fsdp2_but_for_the_order_of_additions(
    ranks: RankPool, layout: Layout, microbatches: int
) -> None:
    want, got = both_curves(ranks, "llama3", False, layout, "float32", microbatches)
    errors = [abs(g[0] - w[0]) / w[0] for g, w in zip(got, want, strict=True)]
    assert max(errors) < 2e-7


@pytest.mark.parametrize(
    ("name", "is_tied", "keys"),
    [
        ("llama3", False, {}),
        ("qwen3", True, {}),
        ("qwen3", True, {"recompute": ActivationCheckpoint(mode="full")}),
        ("qwen3", False, {"recompute": ActivationCheckpoint(mode="selective")}),
        ("llama3", True, {"compile": AOT_EAGER}),
        ("llama3", True, {"compile": AOT_EAGER, "recompute": ActivationCheckpoint(mode="full")}),
        ("qwen3", False, {"compile": AOT_EAGER, "recompute": ActivationCheckpoint()}),
        ("qwen3_moe", False, {}),
        ("qwen3_next", False, {}),
    ],
    ids=str,
)
def test_casts_on_one_rank_are_fsdp2_bit_for_bit(
    ranks: RankPool, name: str, is_tied: bool, keys: dict[str, Any]
) -> None:
    cast, fsdp2 = (
        ranks.run(curve, 1, name, is_tied, Layout(1, parallelism, **keys), "bfloat16", 2)[0]
        for parallelism in ({}, {RESHARD: "always"})
    )
    assert len(set(cast)) == STEPS
    assert cast == fsdp2


@pytest.mark.slow
def test_a_smaller_group_to_reshard_to_changes_no_number(ranks: RankPool) -> None:
    whole, smaller = (
        ranks.run(curve, 8, "llama3", False, layout, "float32", 1)[0]
        for layout in (Layout(8, {REPLICATE: 2}), Layout(8, {REPLICATE: 2, RESHARD: 2}))
    )
    assert whole == smaller
