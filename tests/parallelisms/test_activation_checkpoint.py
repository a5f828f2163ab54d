"""What is kept for backward and what is computed again; gradients stay the same."""

import pytest
import torch
import torch.nn as nn
from torch.autograd.graph import saved_tensors_hooks

from config.job_config import ActivationCheckpoint, Compile
from data.loader import count_valid
from parallelisms.activation_checkpoint import apply_activation_checkpoint
from parallelisms.materialize import materialize
from runtime.distributed import local_part
from tests.layouts import CPU, Layout, spread
from tests.parallelisms.test_parity import args_of, global_batch, rows_of
from tests.ranks import RankPool

MIN_CUT = Compile(enable=True, backend="aot_eager_decomp_partition")
BUDGETS = (1.0, 0.5, 0.0)


def kept_and_gradients(name: str, budget: float) -> tuple[int, list[torch.Tensor]]:
    """Bytes that a forward keeps for its backward, without weights; what backward makes of it."""
    torch.compiler.reset()
    recompute = ActivationCheckpoint(mode="memory_budget", memory_budget=budget)
    args = args_of(name, False, False, n_layers=2)
    found = spread(name, args, Layout(1, recompute=recompute, compile=MIN_CUT), dtype="float64")
    materialize(found.model, CPU, seed=7)
    batch = rows_of(global_batch(args.vocab_size, False), slice(0, 4))
    # Storages, so that none is freed and its place counted for another.
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            storage = local_part(tensor).untyped_storage()
            kept[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        found.runner().train([batch], count_valid([batch]))
    weights = {local_part(p).untyped_storage().data_ptr() for p in found.model.parameters()}
    total = sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in weights)
    return total, [local_part(p.grad) for p in found.model.parameters() if p.grad is not None]


def check_budgets(name: str) -> list[int]:
    found = [kept_and_gradients(name, budget) for budget in BUDGETS]
    first = found[0][1]
    assert first
    for _, gradients in found[1:]:
        for got, want in zip(gradients, first, strict=True):
            assert (got - want).norm() / want.norm() < 1e-12
    return [kept for kept, _ in found]


# The budget is not that of experts, which are outside of graphs.
@pytest.mark.parametrize(("name", "factor"), [("qwen3", 1.2), ("qwen3_moe", 1.05)])
def test_a_smaller_budget_keeps_less_and_changes_no_gradient(
    ranks: RankPool, name: str, factor: float
) -> None:
    (kept,) = ranks.run(check_budgets, 1, name)
    assert kept[0] > factor * kept[1] > factor**2 * kept[2], kept


class Scaled(nn.Module):
    n_calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
        self.n_calls += 1
        return (x * self.weight * scale).exp()


class Doubled(Scaled):
    """As data parallel changes the class of a block that is recomputed already."""

    def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
        return super().forward(2 * x, scale=scale)


def test_a_block_keeps_its_names_its_keywords_and_its_later_class() -> None:
    block = Scaled()
    config = ActivationCheckpoint(mode="full")
    blocks = nn.ModuleDict({"0": block})
    apply_activation_checkpoint(blocks, config=config, pieces=(), frees_weights=False)
    block.__class__ = Doubled
    block(torch.ones(2), scale=0.5).sum().backward()
    assert list(blocks.state_dict()) == ["0.weight"]
    assert block.n_calls == 2
    torch.testing.assert_close(block.weight.grad, torch.ones(2).exp())
