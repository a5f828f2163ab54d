"""Statistics per layer on any mesh are those of one device, computed in float64 the long way.

Two experts are never chosen. On a mesh, a step has several microbatches.
"""

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn as nn

from build_model import ShardedModel
from config.job_config import Parallelism
from data.loader import num_target_tokens
from forward_backward import SPMDRunner
from metrics import layer_stats
from metrics.layer_stats import LayerStats, largest_attention_logit
from models import TransformerArgs, find_model
from models.meta import build_on_meta
from optim.grad_norm import local_norms
from optim.muon import hidden_matrices
from optim.optimizer import build_optimizer
from parallelisms.materialize import materialize
from runtime.distributed import sum_over
from tests.lib.cells import ROWS, Cell
from tests.lib.layouts import CPU
from tests.lib.parity import SEED, build_cell, global_batch, rows_of
from tests.lib.ranks import RankPool

CELLS = [
    Cell(model="qwen3", shard=3, tied=True),
    Cell(model="qwen3", replicate=2, shard=2, recompute="full", documents=True),
    Cell(data_parallel="ddp", shard=2, narrow=True, recompute="selective"),
    Cell(data_parallel="simple_fsdp", shard=2, optimizer="muon"),
    Cell(model="qwen3", tensor=2, context="ulysses 2", documents=True),
    Cell(model="qwen3_next", context="allgather 2", documents=True),
    Cell(model="qwen3", pipeline="1F1B 2", shard=2, tied=True),
    Cell(model="qwen3_moe", pipeline="Interleaved1F1B 2", shard=2, expert=2),
    Cell(model="qwen3_moe", tensor=2, expert=2),
    Cell(model="qwen3", shard=2, recompute="selective", compile=True),
]


def kill_experts(moes: list[Any]) -> None:
    for moe in moes:
        moe.bias[[1, 5]] = -10.0


def reference_of(cell: Cell) -> tuple[dict[str, float], dict[str, float]]:
    return _reference(cell.model, cell.args, cell.documents, cell.optimizer)


@cache
def _reference(
    model: str, args: TransformerArgs, documents: bool, optimizer: str
) -> tuple[dict[str, float], dict[str, float]]:
    """Statistics of one device, which sees the whole batch; and each new weight's norm."""
    batch = global_batch(args.vocab_size, documents)
    spec, _ = find_model(model, "debugmodel")
    module = build_on_meta(spec, args, torch.float64)
    materialize(module, CPU, seed=SEED)
    kill_experts(spec.moes(module))
    stats: dict[str, float] = {}
    for name, block in spec.blocks(module).items():
        if block.attention in spec.attentions(module):
            block.attention.inner = DenseLogits(block.attention.inner, stats, name)
        block.register_forward_hook(
            lambda block, inputs, output, name=name: stats.update(
                {f"layer_activation_rms/{name}": output.detach().square().mean().sqrt().item()}
            )
        )
    SPMDRunner(module, parallelism=Parallelism(), device=CPU).forward_backward(
        [batch], num_target_tokens([batch])
    )
    for name, block in spec.blocks(module).items():
        if block.feed_forward in spec.moes(module):
            counts = block.feed_forward.tokens_per_expert.tolist()
            stats[f"layer_dead_experts/{name}"] = counts.count(0) / len(counts)
    parameters = dict(module.named_parameters())
    old = {fqn: p.detach().clone() for fqn, p in parameters.items()}
    config = Cell(model=model, optimizer=optimizer).job_config.optimizer
    matrices = hidden_matrices(spec.blocks(module), spec.moes(module))
    build_optimizer(module, config, matrices=matrices).step()
    layers: dict[str, list[str]] = {}
    for fqn in parameters:
        first, second = fqn.split(".")[:2]
        layers.setdefault(second if first == "layers" else first, []).append(fqn)
    for layer, fqns in layers.items():
        weight, grad, update = (
            torch.cat([of(fqn).flatten() for fqn in fqns]).norm().item()
            for of in (
                old.__getitem__,
                lambda fqn: parameters[fqn].grad,
                lambda fqn: parameters[fqn].detach() - old[fqn],
            )
        )
        stats[f"layer_weight_norm/{layer}"] = weight
        stats[f"layer_grad_norm/{layer}"] = grad
        if weight > 0:
            stats[f"layer_update_ratio/{layer}"] = update / weight
    return stats, {fqn: p.detach().norm().item() for fqn, p in parameters.items()}


class DenseLogits(nn.Module):
    """Records the largest of all logits that the mask leaves."""

    def __init__(self, inner: nn.Module, stats: dict[str, float], name: str) -> None:
        super().__init__()
        self.inner, self.stats, self.name = inner, stats, name

    def forward(self, q: Any, k: Any, v: Any, document_ids: Any) -> torch.Tensor:
        largest = dense_largest(q.detach(), k.detach(), document_ids)
        self.stats[f"layer_attention_logit/{self.name}"] = largest.item()
        return self.inner(q, k, v, document_ids)


def dense_largest(
    q: torch.Tensor, k: torch.Tensor, document_ids: torch.Tensor | None
) -> torch.Tensor:
    keys = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    logits = torch.einsum("bqhd,bkhd->bhqk", q, keys) / q.shape[-1] ** 0.5
    offset = k.shape[1] - q.shape[1]
    is_seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(offset)[None, None]
    if document_ids is not None:
        is_same = document_ids[:, offset:, None] == document_ids[:, None, :]
        is_seen = is_seen & is_same[:, None]
    return logits[is_seen.expand_as(logits)].max()


def build_stats(sharded: ShardedModel) -> LayerStats:
    return LayerStats(
        sharded.module,
        sharded.spec,
        fqns=sharded.fqns,
        data_mesh=sharded.dims.data_mesh,
        freq=3,
        compiled=sharded.stages if sharded.config.compile.enable else [],
    )


def hooks_of(module: nn.Module) -> list[tuple[int, int]]:
    return [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in module.modules()]


def observe_cell(cell: Cell) -> tuple[dict[str, float], dict[str, float]]:
    """Train one observed step on this rank; return its statistics, and each new weight's norm."""
    sharded = build_cell(cell, "cpu")
    spec, dims, module = sharded.spec, sharded.dims, sharded.module
    kill_experts(spec.moes(module))
    matrices = hidden_matrices(spec.blocks(module), spec.moes(module))
    optimizer = build_optimizer(
        module, sharded.config.optimizer, matrices=matrices, weight_mesh=dims.weight_mesh
    )
    runner, stats = sharded.runner(), build_stats(sharded)
    assert [step for step in range(7) if stats.is_due(step)] == [0, 3, 6]
    degree, rank = dims.batch_mesh.size(), dims.batch_mesh.get_local_rank()
    count = cell.microbatches[0]
    n_rows = ROWS // (degree * count)
    starts = range(rank * n_rows, ROWS, degree * n_rows)
    batch = global_batch(cell.args.vocab_size, cell.documents)
    microbatches = [rows_of(batch, slice(start, start + n_rows)) for start in starts]
    n_tokens = int(sum_over(torch.tensor(num_target_tokens(microbatches)), dims.batch_mesh))
    hooks = hooks_of(module)
    parameters = dict(module.named_parameters())
    found = stats.observe_forward(lambda: runner.evaluate(microbatches))
    assert hooks_of(module) == hooks
    runner.forward_backward(microbatches, n_tokens)
    norms, n_graphs = local_norms(list(parameters.values())), n_compiled()
    with stats.observe_update(norms, runner.tied_duplicates) as others:
        optimizer.step()
    optimizer.zero_grad()
    whole = {fqn: p.detach() for fqn, p in parameters.items()}
    new = {fqn: getattr(p, "full_tensor", lambda p=p: p)().norm() for fqn, p in whole.items()}
    stats.observe_forward(lambda: runner.evaluate(microbatches))
    runner.forward_backward(microbatches, n_tokens)
    assert n_compiled() == n_graphs, "a step after an observed one compiles again"
    return found | others, {fqn: value.item() for fqn, value in new.items()}


def n_compiled() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_statistics_on_a_mesh_are_those_of_one_device(ranks: RankPool, cell: Cell) -> None:
    want, weights = reference_of(cell)
    for found, norms in ranks.run(observe_cell, cell.world_size, cell):
        assert found == pytest.approx(want, rel=1e-9)
        assert norms == pytest.approx({fqn: weights[fqn] for fqn in norms}, rel=1e-9)
    dead = [value for key, value in want.items() if "dead_experts" in key]
    assert all(value == 0.25 for value in dead)
    assert bool(dead) == (cell.model in ("qwen3_moe", "qwen3_next"))


@pytest.mark.parametrize("n_queries", [13, 5, 1])
@pytest.mark.parametrize("chunk", [1, 100, 1 << 26])
@pytest.mark.parametrize("documents", [False, True])
def test_largest_logit_is_that_of_the_dense_matrix(
    monkeypatch: pytest.MonkeyPatch, n_queries: int, chunk: int, documents: bool
) -> None:
    monkeypatch.setattr(layer_stats, "CHUNK", chunk)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, n_queries, 4, 6, generator=generator, dtype=torch.float64)
    k = torch.randn(2, 13, 2, 6, generator=generator, dtype=torch.float64)
    # The largest logits of all are behind the mask.
    k[:, -1] *= 100 if n_queries > 1 else 1
    q[:, -1] *= 0.01 if n_queries > 1 else 1
    ids = torch.tensor([[0] * 6 + [1] * 7, [0] * 13]) if documents else None
    torch.testing.assert_close(largest_attention_logit(q, k, ids), dense_largest(q, k, ids))


def test_nothing_is_observed_by_default() -> None:
    stats = LayerStats(nn.Module(), find_model("llama3", "debugmodel")[0],
                       fqns=[], data_mesh=None, freq=0)  # fmt: skip
    assert not any(stats.is_due(step) for step in range(5))
