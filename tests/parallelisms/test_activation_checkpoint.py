"""A memory budget: the less of it, the less is kept for backward; gradients stay the same."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from config.job_config import ActivationCheckpoint, Compile
from data.loader import count_valid
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
