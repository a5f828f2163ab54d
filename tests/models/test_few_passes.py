"""RMSNorm and rotary embeddings with custom backward match the plain formulas."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kernels.rms_norm import RMSNorm
from models.transformer import apply_rope

EPS, DIM = 1e-5, 48
DTYPES = [torch.bfloat16, torch.float32, torch.float64]
Op = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    norm = RMSNorm(DIM, EPS)
    del norm.weight
    norm.weight = weight
    return norm(x)


def plain_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def plain_rope(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    cos, sin = rope[:, :, :, None]
    first, second = x.to(rope.dtype).chunk(2, dim=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat(rotated, dim=-1).type_as(x)


def with_gradients(op: Op, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return the output, and the gradients of inputs that require one."""
    leaves = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs]
    out = op(*leaves)
    generator = torch.Generator().manual_seed(1)
    out.backward(torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype))
    found = [leaf.grad for leaf in leaves if leaf.requires_grad]
    return [out.detach(), *(grad for grad in found if grad is not None)]


def inputs_of(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [(3 * tensor).to(dtype).requires_grad_() for tensor in tensors]


def angles(dtype: torch.dtype) -> torch.Tensor:
    positions = torch.linspace(0, 9, 7 * 5, dtype=torch.float64).view(1, 7, 5)
    precise = torch.promote_types(dtype, torch.float32)
    return torch.stack([positions.cos(), positions.sin()]).to(precise)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_is_bitwise_and_gradients_round_no_more(
    dtype: torch.dtype,
) -> None:
    x, weight = inputs_of(dtype, (3, 5, DIM), (DIM,))
    got_all, want_all = with_gradients(normed, x, weight), with_gradients(plain_norm, x, weight)
    assert torch.equal(got_all[0], want_all[0])
    exact = with_gradients(plain_norm, x.detach().double().requires_grad_(),
                           weight.detach().double().requires_grad_())  # fmt: skip
    for got, want, true in zip(got_all, want_all, exact, strict=True):
        error, allowed = ((found - true).abs().max().item() for found in (got, want))
        assert error <= 1.5 * allowed + 4 * torch.finfo(dtype).eps * true.abs().max().item()
        assert got.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_equals_the_plain_formula_bit_for_bit(dtype: torch.dtype) -> None:
    (x,) = inputs_of(dtype, (2, 7, 3, 10))
    rope = angles(dtype)
    got_all, want_all = with_gradients(apply_rope, x, rope), with_gradients(plain_rope, x, rope)
    assert len(got_all) == 2
    assert all(map(torch.equal, got_all, want_all))


@pytest.mark.parametrize(
    ("op", "inputs"),
    [
        (normed, inputs_of(torch.float64, (2, 3, DIM), (DIM,))),
        (apply_rope, [*inputs_of(torch.float64, (2, 7, 1, 10)), angles(torch.float64)]),
    ],
)
def test_backward_passes_gradcheck(op: Op, inputs: list[Any]) -> None:
    assert torch.autograd.gradcheck(op, inputs)
