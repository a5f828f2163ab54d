"""Modes whose loss curves are bitwise equal in float32 and bfloat16, where rounding shows."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from config.job_config import ActivationCheckpoint, Compile, Optimizer, Parallelism
from data.loader import Microbatch, num_target_tokens
from forward_backward import SPMDRunner
from models import find_model
from optim.grad_norm import clip_grad_norm_
from optim.optimizer import build_optimizer
from parallelisms.materialize import materialize
from runtime.distributed import sum_over
from tests.lib.layouts import CPU, MODE, REPLICATE, RESHARD, TP, Layout, shard_debugmodel
from tests.lib.marks import slow
from tests.lib.ranks import RankPool

STEPS, ROWS, SEQ_LEN = 2, 2, 32
AOT_EAGER = Compile(enable=True, backend="aot_eager")
SIMPLE = {MODE: "simple_fsdp"}


def train_curve(
    name: str, is_tied: bool, layout: Layout, compute_dtype: str, microbatches: int
) -> list[tuple[float, float]]:
    """Loss and gradient norm of each of ``STEPS`` steps on changing data."""
    # Compilations of earlier tests in these processes count toward a limit.
    torch.compiler.reset()
    args = find_model(name, "debugmodel")[1]
    args = replace(args, n_layers=2, max_seq_len=SEQ_LEN, tie_embeddings=is_tied)
    if TP not in layout.parallelism:
        # Divides by no degree.
        args = replace(args, vocab_size=331)
    sharded = shard_debugmodel(name, args, layout, compute_dtype=compute_dtype)
    model, dims = sharded.module, sharded.dims
    materialize(model, CPU, seed=7)
    parameters = list(model.parameters())
    optimizer = build_optimizer(model, Optimizer(lr=1e-2))
    parallelism = Parallelism(**layout.parallelism)
    runner = SPMDRunner(model, parallelism=parallelism, device=CPU)
    generator = torch.Generator().manual_seed(dims.batch_mesh.get_local_rank())
    found = []
    for _ in range(STEPS):
        tokens = torch.randint(300, (microbatches, ROWS, SEQ_LEN + 1), generator=generator)
        batches = [Microbatch(rows[:, :-1], rows[:, 1:]) for rows in tokens]
        n_tokens = int(sum_over(torch.tensor(num_target_tokens(batches)), dims.batch_mesh))
        loss = runner.forward_backward(batches, n_tokens).sum()
        norm = clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((sum_over(loss, dims.batch_mesh).item(), norm.item()))
    return found


def train_curves(
    name: str, is_tied: bool, layouts: list[Layout], compute_dtype: str, microbatches: int
) -> list[list[tuple[float, float]]]:
    """Curves of layouts of one mesh, for which DTensor prepares its operators once."""
    return [train_curve(name, is_tied, each, compute_dtype, microbatches) for each in layouts]


def both_curves(
    ranks: RankPool, name: str, is_tied: bool, layout: Layout, compute_dtype: str, microbatches: int
) -> list[list[tuple[float, float]]]:
    """Curves of FSDP2 and of SimpleFSDP."""
    layouts = [layout, replace(layout, parallelism=layout.parallelism | SIMPLE)]
    arguments = (name, is_tied, layouts, compute_dtype, microbatches)
    return ranks.run(train_curves, layout.world_size, *arguments)[0]


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
        *(slow("qwen3", True, *case) for case in CASES[2:]),
    ],
    ids=str,
)
def test_simple_fsdp_is_bitwise_equal_to_fsdp2(
    ranks: RankPool, name: str, is_tied: bool, layout: Layout, microbatches: int, compute_dtype: str
) -> None:
    want, got = both_curves(ranks, name, is_tied, layout, compute_dtype, microbatches)
    assert len(set(want)) == STEPS
    assert got == want


@pytest.mark.parametrize(
    ("layout", "microbatches"),
    [
        # gloo's chunk boundaries depend on the rest of the buffer, and so does the order in which
        # three or more ranks are added.
        (Layout(3), 2),
        # FSDP2 adds microbatches before replicas, SimpleFSDP replicas before microbatches.
        (Layout(4, {REPLICATE: 2}), 2),
    ],
    ids=str,
)
def test_simple_fsdp_differs_from_fsdp2_only_by_addition_order(
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
        slow("llama3", True, {"compile": AOT_EAGER}),
        ("llama3", True, {"compile": AOT_EAGER, "recompute": ActivationCheckpoint(mode="full")}),
        ("qwen3", False, {"compile": AOT_EAGER, "recompute": ActivationCheckpoint()}),
        ("qwen3_moe", False, {}),
        ("qwen3_next", False, {}),
    ],
    ids=str,
)
def test_casts_on_one_rank_are_bitwise_equal_to_fsdp2(
    ranks: RankPool, name: str, is_tied: bool, keys: dict[str, Any]
) -> None:
    # Compiled code adds in another order than eager code on some CPUs, so both are compiled.
    layouts = [Layout(1, **keys), Layout(1, {RESHARD: "always"}, **keys)]
    cast, fsdp2 = ranks.run(train_curves, 1, name, is_tied, layouts, "bfloat16", 2)[0]
    assert len(set(cast)) == STEPS
    assert cast == fsdp2


@pytest.mark.slow
def test_partial_reshard_after_forward_changes_no_bit(ranks: RankPool) -> None:
    whole, smaller = (
        ranks.run(train_curve, 8, "llama3", False, layout, "float32", 1)[0]
        for layout in (Layout(8, {REPLICATE: 2}), Layout(8, {REPLICATE: 2, RESHARD: 2}))
    )
    assert whole == smaller
