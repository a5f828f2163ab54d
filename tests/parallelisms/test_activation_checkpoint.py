"""Activation checkpointing saves less for backward and changes no gradient."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from config.job_config import ActivationCheckpoint, Compile
from data.loader import num_target_tokens
from models import find_spec
from models.transformer import FeedForward, Transformer, TransformerBlock
from parallelisms.activation_checkpoint import apply_activation_checkpoint
from parallelisms.materialize import materialize
from runtime.dtensor import to_local
from tests.lib.layouts import CPU, PP, Layout, args_of, shard_debugmodel
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


class DropoutFeedForward(FeedForward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(F.dropout(x, 0.25, self.training)), 0.5, self.training)


class Dropout(Transformer):
    def build_block(self, index: int) -> nn.Module:
        block = TransformerBlock(self.args)
        block.feed_forward = DropoutFeedForward(self.args)
        return block


DROPOUT = replace(find_spec("llama3"), model_cls=Dropout)
OWN = f"{__name__}:DROPOUT"
FULL, SELECTIVE = (ActivationCheckpoint(mode=mode) for mode in ("full", "selective"))
RANDOM_LAYOUTS = [
    Layout(1, recompute=FULL),
    Layout(1, recompute=SELECTIVE),
    Layout(1, recompute=FULL, compile=MIN_CUT),
    Layout(1, recompute=SELECTIVE, compile=MIN_CUT),
    Layout(2, {PP: 2}, recompute=FULL),
]


def check_dropout(layout: Layout) -> None:
    """Gradients are those without recomputation; held-out losses are always the same."""
    found = []
    for each in (replace(layout, recompute=ActivationCheckpoint(mode="none")), layout):
        torch.compiler.reset()
        args = args_of(OWN)
        sharded = shard_debugmodel(OWN, args, each, dtype="float64")
        materialize(sharded.module, CPU, seed=7)
        runner, batch = sharded.runner(), global_batch(args.vocab_size, False)
        batches = [rows_of(batch, slice(row, row + 1)) for row in range(2)]
        validation = [runner.evaluate(batches).tolist() for _ in range(2)]
        assert validation[0] == validation[1]
        torch.manual_seed(3)
        losses = runner.forward_backward(batches, num_target_tokens(batches)).tolist()
        gradients = [to_local(p.grad) for p in sharded.module.parameters() if p.grad is not None]
        assert runner.evaluate(batches).tolist() == validation[0]
        assert torch.equal(runner.logits(batches[0]), runner.logits(batches[0]))
        found.append((losses, gradients))
    assert found[0][0] == found[1][0]
    for want, got in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("layout", RANDOM_LAYOUTS, ids=str)
def test_recomputed_dropout_is_that_of_forward(ranks: RankPool, layout: Layout) -> None:
    ranks.run(check_dropout, layout.world_size, layout)


class FlashAttention(nn.Module):
    """A GPU's attention, on the meta device."""

    def __init__(self, dropout_p: float) -> None:
        super().__init__()
        self.dropout_p = dropout_p

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(q, q, q, self.dropout_p, True)[0].cos()


class CountAttentions(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._scaled_dot_product_flash_attention.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("dropout_p", "count"), [(0.0, 1), (0.5, 2)])
def test_attention_is_saved_unless_it_draws_numbers(dropout_p: float, count: int) -> None:
    blocks = nn.ModuleDict({"0": FlashAttention(dropout_p)})
    apply_activation_checkpoint(
        blocks, config=SELECTIVE, regions=(), frees_weights=False, is_random=True
    )
    q = torch.ones(1, 2, 8, 8, device="meta", requires_grad=True)
    with CountAttentions() as attentions:
        blocks["0"](q).sum().backward()
    assert attentions.count == count


class HostCopies(TorchDispatchMode):
    """Counts copies from the meta device to the host, and makes them zeros."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].is_meta:
            self.count += 1
            return torch.zeros_like(args[0], device=kwargs["device"])
        return func(*args, **kwargs)


class Waiting(nn.Module):
    """Reads on the host what the device has computed, as expert parallel does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.detach().sum(dim=1).cpu().tolist() == [0.0, 0.0]
        return x.sin().cos()


@pytest.mark.parametrize(("config", "count"), [(SELECTIVE, 1), (FULL, 2)])
def test_selective_recomputation_does_not_wait(config: ActivationCheckpoint, count: int) -> None:
    blocks = nn.ModuleDict({"0": Waiting()})
    apply_activation_checkpoint(
        blocks, config=config, regions=(), frees_weights=False, is_random=False
    )
    x = torch.ones(2, 2, device="meta", requires_grad=True)
    with HostCopies() as copies:
        blocks["0"](x).sum().backward()
    assert copies.count == count


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


@pytest.mark.parametrize("name", ["0", "encoder"])
def test_checkpointed_block_keeps_fqns_kwargs_and_later_class(name: str) -> None:
    block = Scaled()
    config = ActivationCheckpoint(mode="full")
    blocks = nn.ModuleDict({name: block})
    apply_activation_checkpoint(
        blocks, config=config, regions=(), frees_weights=False, is_random=False
    )
    block.__class__ = Doubled
    block(torch.ones(2), scale=0.5).sum().backward()
    assert list(blocks.state_dict()) == [f"{name}.weight"]
    assert block.n_calls == 2
    torch.testing.assert_close(block.weight.grad, torch.ones(2).exp())
