"""Attention by blocks: the numbers of PyTorch's kernel, with no more rounding than it has."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from config.job_config import ActivationCheckpoint
from models.transformer import InnerAttention
from parallelisms.activation_checkpoint import apply_activation_checkpoint
from runtime.block_attention import (
    BLOCK,
    LONGEST,
    _attend,
    block_attention,
    use_block_attention,
)

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
OURS = torch.ops.shardloom.block_attention.default


class Counted(TorchDispatchMode):
    """How often ``OURS`` runs."""

    n_runs = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n_runs += op is OURS
        return op(*args, **(kwargs or {}))


def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def drawn(
    s: int, *, b: int = 2, heads: tuple[int, int] = (4, 2), dim: int = 16, sharpness: float = 1.0
) -> list[torch.Tensor]:
    """q, k, v in float64, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    counts = (heads[0], heads[1], heads[1], heads[0])
    shapes = [(b, s, count, dim) for count in counts]
    tensors = [torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes]
    return [tensors[0] * sharpness, *tensors[1:]]


def with_gradients(attend: Attend, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors[:3]]
    out = attend(*leaves)
    out.backward(tensors[3])
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


class Attention(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def by_blocks(inner: nn.Module, *, has_fast_float32: bool = False) -> nn.Module:
    """What is in its place where blocks may be used."""
    attention = Attention(inner)
    use_block_attention([attention], has_fast_float32=has_fast_float32, heads=(4, 2), head_dim=16)
    return attention.inner


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (6, 1)])
@pytest.mark.parametrize("s", [BLOCK, 3 * BLOCK, LONGEST + BLOCK])
def test_outputs_and_gradients_are_those_of_pytorchs_kernel(s: int, heads: tuple[int, int]) -> None:
    tensors = drawn(s, heads=heads)
    ours, theirs = with_gradients(block_attention, tensors), with_gradients(kernel, tensors)
    assert len(ours) == 4
    assert max(map(error, ours, theirs)) < 1e-13


# Scores of 10 and more, as trained models have, would be off by tenths if they were rounded.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sharpness", [1.0, 10.0])
@pytest.mark.parametrize("dim", [64, 96])
def test_it_rounds_no_more_than_pytorchs_kernel(
    dim: int, sharpness: float, dtype: torch.dtype
) -> None:
    tensors = [t.to(dtype) for t in drawn(4 * BLOCK, dim=dim, sharpness=sharpness)]
    exact = with_gradients(kernel, [t.double() for t in tensors])
    ours, theirs = with_gradients(block_attention, tensors), with_gradients(kernel, tensors)
    assert all(found.dtype == dtype for found in ours)
    for found, other, true in zip(ours, theirs, exact, strict=True):
        assert error(found, true) < 1.5 * error(other, true)


def test_autocast_rounds_no_scores() -> None:
    q, k, v = (t.bfloat16() for t in drawn(BLOCK, dim=64, sharpness=10.0)[:3])
    with torch.autocast("cpu", torch.bfloat16):
        inside = block_attention(q, k, v)
    assert torch.equal(inside, block_attention(q, k, v))


def test_a_second_derivative_is_refused() -> None:
    q, k, v = (t.requires_grad_() for t in drawn(BLOCK)[:3])
    total = block_attention(q, k, v).square().sum()
    (first,) = torch.autograd.grad(total, q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_sequence_does_not_depend_on_the_others_of_its_batch(
    dtype: torch.dtype,
) -> None:
    tensors = [t.to(dtype) for t in drawn(2 * BLOCK, b=3, dim=64)]
    together = with_gradients(block_attention, tensors)
    alone = with_gradients(block_attention, [t[1:2] for t in tensors])
    assert all(torch.equal(a[1:2], b) for a, b in zip(together, alone, strict=True))


@pytest.mark.parametrize(
    ("s", "dtype", "documents", "runs"),
    [
        (BLOCK, torch.bfloat16, False, 1),
        (LONGEST, torch.bfloat16, False, 1),
        (LONGEST + BLOCK, torch.bfloat16, False, 0),
        (BLOCK + 1, torch.bfloat16, False, 0),
        (BLOCK, torch.float32, False, 0),
        (BLOCK, torch.bfloat16, True, 0),
    ],
)
def test_a_model_takes_it_where_it_is_the_faster_one(
    s: int, dtype: torch.dtype, documents: bool, runs: int
) -> None:
    q, k, v = (t.to(dtype) for t in drawn(s, b=1)[:3])
    ids = torch.zeros(1, s, dtype=torch.int64) if documents else None
    attend = by_blocks(InnerAttention())
    with Counted() as counted, torch.inference_mode():
        out = attend(q, k, v, ids)
    assert counted.n_runs == runs
    assert error(out, kernel(*(t.double() for t in (q, k, v)))) < 5e-3


@pytest.mark.parametrize(("dtype", "takes_it"), [(torch.float32, True), (torch.float64, False)])
def test_in_float32_a_model_takes_it_with_onednns_products(
    dtype: torch.dtype, takes_it: bool
) -> None:
    q, k, v = (t.to(dtype) for t in drawn(BLOCK)[:3])
    attend = by_blocks(InnerAttention(), has_fast_float32=True)
    with Counted() as counted, torch.no_grad():
        attend(q, k, v, None)
    assert counted.n_runs == takes_it
    compiled: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        compiled.extend(node.target for node in graph.graph.nodes)
        return graph

    torch.compiler.reset()
    torch.compile(attend, fullgraph=True, backend=backend)(q, k, v, None)
    assert (OURS in compiled) == takes_it


def test_keys_before_the_queries_are_left_to_pytorch() -> None:
    q, k, v = (t.bfloat16() for t in drawn(2 * BLOCK)[:3])
    attend = by_blocks(InnerAttention())
    with Counted() as counted:
        attend(q[:, BLOCK:], k, v, None)
    assert counted.n_runs == 0


class Softer(InnerAttention):
    """As a user's own may be."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, document_ids: torch.Tensor | None
    ) -> torch.Tensor:
        return super().forward(q / 2, k, v, document_ids)


def test_attention_of_another_kind_is_left_alone(told: pytest.LogCaptureFixture) -> None:
    assert isinstance(by_blocks(Softer()), Softer)
    assert "attention: not by blocks: its results are off" in told.text


@pytest.mark.parametrize(("s", "is_transposed"), [(BLOCK, False), (2 * BLOCK, True)])
def test_it_is_an_operation_as_pytorch_wants_them(s: int, is_transposed: bool) -> None:
    inputs = drawn(s)[:3]
    if is_transposed:
        inputs = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs]
    opcheck(_attend, [t.requires_grad_() for t in inputs])


@pytest.mark.parametrize("s", [BLOCK, 2 * BLOCK])
def test_compiled_it_is_the_same_to_the_last_bit(s: int) -> None:
    torch.compiler.reset()
    tensors = [t.bfloat16() for t in drawn(s)]
    compiled = torch.compile(block_attention, fullgraph=True, backend="aot_eager")
    eager = with_gradients(block_attention, tensors)
    assert all(map(torch.equal, with_gradients(compiled, tensors), eager))


class Block(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return block_attention(q, k, v).sin()


@pytest.mark.parametrize(("mode", "runs"), [("none", 1), ("selective", 1), ("full", 2)])
def test_selective_recomputation_keeps_it(mode: Any, runs: int) -> None:
    config = ActivationCheckpoint(mode=mode, selective="op")
    blocks = nn.ModuleDict({"0": Block()})
    apply_activation_checkpoint(blocks, config=config, pieces=(), frees_weights=False)
    tensors = [t.bfloat16() for t in drawn(BLOCK)]
    with Counted() as counted:
        found = with_gradients(blocks["0"], tensors)
    assert counted.n_runs == runs
    assert all(map(torch.equal, found, with_gradients(Block(), tensors)))
