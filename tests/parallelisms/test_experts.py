"""Experts get the same tokens on any mesh, and are gathered with their block."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.profiler import profile

from config.job_config import Optimizer, Parallelism
from data.loader import num_target_tokens
from forward_backward import SPMDRunner
from models import find_model
from models.meta import build_on_meta
from models.moe import MoE
from optim.grad_norm import clip_grad_norm_
from optim.optimizer import build_optimizer
from optim.router_bias import ExpertBalancer
from parallelisms.materialize import materialize
from parallelisms.parallel_dims import ParallelDims
from tests.lib.cells import ROWS
from tests.lib.layouts import (
    CP,
    CPU,
    METHOD,
    PP,
    SEQ_LEN,
    TP,
    Layout,
    args_of,
    shard_debugmodel,
)
from tests.lib.parity import MAX_NORM, global_batch, rows_of
from tests.lib.ranks import RankPool

RATE = 0.125

EP, GATHER = "expert_parallel_degree", {METHOD: "allgather"}
AHEAD = {"fsdp_forward_prefetch": 1, "fsdp_backward_prefetch": 2}
ROUTED = [
    Layout(2),
    Layout(2, {EP: 2}),
    Layout(2, {TP: 2}),
    Layout(2, {CP: 2} | GATHER),
    Layout(2, {PP: 2}),
    Layout(4, {CP: 2, TP: 2, EP: 4}),
]


def trace_gathers(layout: Layout) -> str:
    """Order of FSDP2's all-gathers, attention and, in brackets, each backward that starts.

    "1e" are the experts of block 1.
    """
    args = args_of("qwen3_moe", n_layers=3)
    found = shard_debugmodel("qwen3_moe", args, layout)
    materialize(found.module, CPU, seed=7)
    runner, batch = found.runner(), global_batch(args.vocab_size, False)
    batches, n_tokens = [rows_of(batch, slice(2))], num_target_tokens([batch])
    runner.forward_backward(batches, n_tokens)
    with profile() as profiler:
        runner.forward_backward(batches, n_tokens)
    seen = []
    for event in sorted(profiler.events() or [], key=lambda event: event.time_range.start):
        what = re.fullmatch(r"FSDP::(all_gather|pre_backward) \((.*)\)", event.name)
        if event.name == "aten::scaled_dot_product_attention":
            seen.append("attend")
        elif what is not None:
            unit = what[2].removeprefix("layers.").replace(".feed_forward.experts", "e")
            seen.append(unit if what[1] == "all_gather" else f"({unit})")
    return " ".join(seen)


@pytest.mark.parametrize(
    ("keys", "forward", "backward"),
    [
        (
            {},
            "tok_embeddings 0 0e attend 1 1e attend 2 2e attend norm, output",
            "(norm, output) 2 2e (2) 1 1e (2e) (1) 0 0e (1e) (0) (0e) (tok_embeddings)",
        ),
        (
            AHEAD,
            "tok_embeddings 0 0e 1 1e attend 2 2e attend norm, output attend",
            "(norm, output) 2 2e 1 1e (2) 0 0e (2e) (1) (1e) (0) (0e) (tok_embeddings)",
        ),
    ],
    ids=["default", "ahead"],
)
def test_experts_are_gathered_with_their_block(
    ranks: RankPool, keys: dict[str, int], forward: str, backward: str
) -> None:
    """Gathered later, they would start after the host has waited for the token counts."""
    for seen in ranks.run(trace_gathers, 4, Layout(4, {EP: 2} | keys)):
        assert seen == f"{forward} {backward}"


def check_routing(layout: Layout) -> None:
    """In each of two steps, each expert gets the same tokens as on one device."""
    args: Any = args_of("qwen3_moe", n_layers=2)
    batch = global_batch(args.vocab_size, False)
    spec, _ = find_model("qwen3_moe", "debugmodel")
    alone = build_on_meta(spec, args, torch.float64)
    sharded = shard_debugmodel("qwen3_moe", args, layout, dtype="float64")
    dims, model = sharded.dims, sharded.module
    rates = {}
    for each in (alone, model):
        materialize(each, CPU, seed=7)
        rates[each] = build_optimizer(each, Optimizer(lr=1e-2))
    rank, degree = dims.batch_mesh.get_local_rank(), dims.batch_mesh.size()
    # A pipeline needs as many microbatches as it has stages.
    n_rows = ROWS // degree // 2
    starts = range(rank * ROWS // degree, (rank + 1) * ROWS // degree, n_rows)
    mine = [rows_of(batch, slice(start, start + n_rows)) for start in starts]
    n_tokens = num_target_tokens([batch])
    balance = ExpertBalancer(spec.moes(model), dims.data_mesh, rate=RATE, device=CPU)
    for step in range(2):
        SPMDRunner(alone, parallelism=Parallelism(), device=CPU).forward_backward([batch], n_tokens)
        sharded.runner().forward_backward(mine, n_tokens)
        for each, optimizer in rates.items():
            clip_grad_norm_(
                list(each.parameters()), MAX_NORM, pp_mesh=dims.pp_mesh if each is model else None
            )
            optimizer.step()
            optimizer.zero_grad()
        loads = {name: load_of(moe, dims) for name, moe in moes_of(model).items()}
        balance.update(torch.zeros(()))
        assert loads
        # A stage has some of the layers, but those of the reference all need their biases.
        for name, want in moes_of(alone).items():
            load = want.tokens_per_expert.clone()
            want.bias += RATE * (load.double().mean() - load).sign().float()
            want.tokens_per_expert.zero_()
            assert load.sum() == ROWS * SEQ_LEN * args.top_k, "a token was dropped"
            if name in loads:
                assert torch.equal(loads[name], load), f"step {step}, {name}"
                assert torch.equal(moes_of(model)[name].bias, want.bias), f"step {step}, {name}"


def moes_of(model: nn.Module) -> dict[str, MoE]:
    return {name: module for name, module in model.named_modules() if isinstance(module, MoE)}


def load_of(moe: MoE, dims: ParallelDims) -> torch.Tensor:
    """Return the tokens of each expert on all ranks. Collective."""
    load = moe.tokens_per_expert.clone()
    for dim in ("batch", "cp", "tp"):
        dist.all_reduce(load, group=dims.data_mesh.get_group(dim))
    return load


def ranks_of_experts() -> list[int]:
    """Ranks that the experts of this rank are split over."""
    dims = ParallelDims.build(Parallelism(expert_parallel_degree=2), 4, "cpu")
    return dist.get_process_group_ranks(dims.build_expert_mesh(2).get_group("ep"))


def test_neighbors_split_the_experts(ranks: RankPool) -> None:
    """Their all-to-alls then stay within a node."""
    assert ranks.run(ranks_of_experts, 4) == [[0, 1], [0, 1], [2, 3], [2, 3]]


@pytest.mark.parametrize("layout", ROUTED, ids=str)
def test_routing_is_the_same_on_every_mesh(ranks: RankPool, layout: Layout) -> None:
    ranks.run(check_routing, layout.world_size, layout)
