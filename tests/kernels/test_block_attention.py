"""Block attention matches PyTorch's SDPA, with no larger rounding errors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from config.job_config import ActivationCheckpoint
from kernels.block_attention import (
    BLOCK,
    MAX_SEQ_LEN,
    _attend,
    apply_block_attention,
    block_attention,
)
from models.transformer import InnerAttention
from parallelisms.activation_checkpoint import apply_activation_checkpoint

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
BLOCK_ATTENTION = torch.ops.shardloom.block_attention.default


class OpCounter(TorchDispatchMode):
    """Count calls of the block attention op."""

    n_runs = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n_runs += op is BLOCK_ATTENTION
        return op(*args, **(kwargs or {}))


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def random_inputs(
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


def inner_after_use(inner: nn.Module, *, has_fast_float32: bool = False) -> nn.Module:
    """Return the module's ``inner`` after ``apply_block_attention``."""
    attention = Attention(inner)
    apply_block_attention([attention], has_fast_float32=has_fast_float32, heads=(4, 2), head_dim=16)
    return attention.inner


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (6, 1)])
@pytest.mark.parametrize("s", [BLOCK, 3 * BLOCK, MAX_SEQ_LEN + BLOCK])
def test_outputs_and_gradients_match_sdpa(s: int, heads: tuple[int, int]) -> None:
    tensors = random_inputs(s, heads=heads)
    got, want = with_gradients(block_attention, tensors), with_gradients(sdpa, tensors)
    assert len(got) == 4
    assert max(map(relative_error, got, want)) < 1e-13


# Rounding scores of 10 and more, as trained models have, would cause errors of tenths.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sharpness", [1.0, 10.0])
@pytest.mark.parametrize("dim", [64, 96])
def test_rounding_errors_are_no_larger_than_sdpas(
    dim: int, sharpness: float, dtype: torch.dtype
) -> None:
    tensors = [t.to(dtype) for t in random_inputs(4 * BLOCK, dim=dim, sharpness=sharpness)]
    exact = with_gradients(sdpa, [t.double() for t in tensors])
    got, want = with_gradients(block_attention, tensors), with_gradients(sdpa, tensors)
    assert all(found.dtype == dtype for found in got)
    for found, other, true in zip(got, want, exact, strict=True):
        assert relative_error(found, true) < 1.5 * relative_error(other, true)


def test_autocast_does_not_round_scores() -> None:
    q, k, v = (t.bfloat16() for t in random_inputs(BLOCK, dim=64, sharpness=10.0)[:3])
    with torch.autocast("cpu", torch.bfloat16):
        inside = block_attention(q, k, v)
    assert torch.equal(inside, block_attention(q, k, v))


def test_second_derivative_raises() -> None:
    q, k, v = (t.requires_grad_() for t in random_inputs(BLOCK)[:3])
    total = block_attention(q, k, v).square().sum()
    (first,) = torch.autograd.grad(total, q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_results_are_independent_of_the_batch(
    dtype: torch.dtype,
) -> None:
    tensors = [t.to(dtype) for t in random_inputs(2 * BLOCK, b=3, dim=64)]
    batched = with_gradients(block_attention, tensors)
    alone = with_gradients(block_attention, [t[1:2] for t in tensors])
    assert all(torch.equal(a[1:2], b) for a, b in zip(batched, alone, strict=True))


@pytest.mark.parametrize(
    ("s", "dtype", "documents", "runs"),
    [
        (BLOCK, torch.bfloat16, False, 1),
        (MAX_SEQ_LEN, torch.bfloat16, False, 1),
        (MAX_SEQ_LEN + BLOCK, torch.bfloat16, False, 0),
        (BLOCK + 1, torch.bfloat16, False, 0),
        (BLOCK, torch.float32, False, 0),
        (BLOCK, torch.bfloat16, True, 0),
    ],
)
def test_block_attention_is_used_where_it_is_faster(
    s: int, dtype: torch.dtype, documents: bool, runs: int
) -> None:
    q, k, v = (t.to(dtype) for t in random_inputs(s, b=1)[:3])
    ids = torch.zeros(1, s, dtype=torch.int64) if documents else None
    attend = inner_after_use(InnerAttention())
    with OpCounter() as counter, torch.inference_mode():
        out = attend(q, k, v, ids)
    assert counter.n_runs == runs
    assert relative_error(out, sdpa(*(t.double() for t in (q, k, v)))) < 5e-3


@pytest.mark.parametrize(("dtype", "is_used"), [(torch.float32, True), (torch.float64, False)])
def test_block_attention_is_used_in_float32_with_onednn(dtype: torch.dtype, is_used: bool) -> None:
    q, k, v = (t.to(dtype) for t in random_inputs(BLOCK)[:3])
    attend = inner_after_use(InnerAttention(), has_fast_float32=True)
    with OpCounter() as counter, torch.no_grad():
        attend(q, k, v, None)
    assert counter.n_runs == is_used
    compiled: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        compiled.extend(node.target for node in graph.graph.nodes)
        return graph

    torch.compiler.reset()
    torch.compile(attend, fullgraph=True, backend=backend)(q, k, v, None)
    assert (BLOCK_ATTENTION in compiled) == is_used


def test_fewer_queries_than_keys_use_sdpa() -> None:
    q, k, v = (t.bfloat16() for t in random_inputs(2 * BLOCK)[:3])
    attend = inner_after_use(InnerAttention())
    with OpCounter() as counter:
        attend(q[:, BLOCK:], k, v, None)
    assert counter.n_runs == 0


class ScaledAttention(InnerAttention):
    """Attention with another scale, as a user's model may have."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, document_ids: torch.Tensor | None
    ) -> torch.Tensor:
        return super().forward(q / 2, k, v, document_ids)


def test_other_attention_is_not_replaced(captured_log: pytest.LogCaptureFixture) -> None:
    assert isinstance(inner_after_use(ScaledAttention()), ScaledAttention)
    assert "block attention disabled: max error is" in captured_log.text


@pytest.mark.parametrize(("s", "is_transposed"), [(BLOCK, False), (2 * BLOCK, True)])
def test_custom_op_passes_opcheck(s: int, is_transposed: bool) -> None:
    inputs = random_inputs(s)[:3]
    if is_transposed:
        inputs = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs]
    opcheck(_attend, [t.requires_grad_() for t in inputs])


@pytest.mark.parametrize("s", [BLOCK, 2 * BLOCK])
def test_compiled_equals_eager_bit_for_bit(s: int) -> None:
    torch.compiler.reset()
    tensors = [t.bfloat16() for t in random_inputs(s)]
    compiled = torch.compile(block_attention, fullgraph=True, backend="aot_eager")
    eager = with_gradients(block_attention, tensors)
    assert all(map(torch.equal, with_gradients(compiled, tensors), eager))


class Block(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return block_attention(q, k, v).sin()


@pytest.mark.parametrize(("mode", "runs"), [("none", 1), ("selective", 1), ("full", 2)])
def test_selective_checkpointing_saves_block_attention(mode: Any, runs: int) -> None:
    config = ActivationCheckpoint(mode=mode, selective="op")
    blocks = nn.ModuleDict({"0": Block()})
    apply_activation_checkpoint(
        blocks, config=config, regions=(), frees_weights=False, is_random=False
    )
    tensors = [t.bfloat16() for t in random_inputs(BLOCK)]
    with OpCounter() as counter:
        found = with_gradients(blocks["0"], tensors)
    assert counter.n_runs == runs
    assert all(map(torch.equal, found, with_gradients(Block(), tensors)))
