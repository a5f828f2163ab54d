"""Activation checkpointing saves less for backward and changes no gradient."""

import pytest
import torch
import torch.nn as nn
from torch.autograd.graph import saved_tensors_hooks

from config.job_config import ActivationCheckpoint, Compile
from data.loader import num_target_tokens
from parallelisms.activation_checkpoint import apply_activation_checkpoint
from parallelisms.materialize import materialize
from runtime.dtensor import to_local
from tests.lib.layouts import CPU, Layout, args_of, shard_debugmodel
from tests.lib.parity import global_batch, rows_of
from tests.lib.ranks import RankPool

MIN_CUT = Compile(enable=True, backend="aot_eager_decomp_partition")
BUDGETS = (1.0, 0.5, 0.0)


def saved_bytes_and_gradients(name: str, budget: float) -> tuple[int, list[torch.Tensor]]:
    """Bytes of activations that forward saves for backward, and the gradients."""
    torch.compiler.reset()
    recompute = ActivationCheckpoint(mode="memory_budget", memory_budget=budget)
    args = args_of(name, n_layers=2)
    found = shard_debugmodel(
        name, args, Layout(1, recompute=recompute, compile=MIN_CUT), dtype="float64"
    )
    materialize(found.module, CPU, seed=7)
    batch = rows_of(global_batch(args.vocab_size, False), slice(0, 4))
    # Holding the storages prevents that one is freed and its address reused.
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            storage = to_local(tensor).untyped_storage()
            saved[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        found.runner().forward_backward([batch], num_target_tokens([batch]))
    weights = {to_local(p).untyped_storage().data_ptr() for p in found.module.parameters()}
    total = sum(storage.nbytes() for pointer, storage in saved.items() if pointer not in weights)
    return total, [to_local(p.grad) for p in found.module.parameters() if p.grad is not None]


def check_budgets(name: str) -> list[int]:
    found = [saved_bytes_and_gradients(name, budget) for budget in BUDGETS]
    first = found[0][1]
    assert first
    for _, gradients in found[1:]:
        for got, want in zip(gradients, first, strict=True):
            assert (got - want).norm() / want.norm() < 1e-12
    return [saved for saved, _ in found]


# Experts are outside of graphs, so the budget does not apply to them.
@pytest.mark.parametrize(("name", "factor"), [("qwen3", 1.2), ("qwen3_moe", 1.05)])
def test_smaller_budget_saves_less_with_equal_gradients(
    ranks: RankPool, name: str, factor: float
) -> None:
    (saved,) = ranks.run(check_budgets, 1, name)
    assert saved[0] > factor * saved[1] > factor**2 * saved[2], saved


class Scaled(nn.Module):
    n_calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
        self.n_calls += 1
        return (x * self.weight * scale).exp()


class Doubled(Scaled):
    """Class that replaces a wrapped block's class, as data parallel does."""

    def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
        return super().forward(2 * x, scale=scale)


def test_checkpointed_block_keeps_fqns_kwargs_and_later_class() -> None:
    block = Scaled()
    config = ActivationCheckpoint(mode="full")
    blocks = nn.ModuleDict({"0": block})
    apply_activation_checkpoint(blocks, config=config, regions=(), frees_weights=False)
    block.__class__ = Doubled
    block(torch.ones(2), scale=0.5).sum().backward()
    assert list(blocks.state_dict()) == ["0.weight"]
    assert block.n_calls == 2
    torch.testing.assert_close(block.weight.grad, torch.ones(2).exp())
