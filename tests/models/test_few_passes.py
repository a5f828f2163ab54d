"""RMSNorm and rotary embeddings with a backward of their own: the plain formulas' numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from models.rms_norm import RMSNorm
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
    """The output, and the gradients of those inputs that want one."""
    leaves = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs]
    out = op(*leaves)
    generator = torch.Generator().manual_seed(1)
    out.backward(torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype))
    found = [leaf.grad for leaf in leaves if leaf.requires_grad]
    return [out.detach(), *(grad for grad in found if grad is not None)]


def inputs_of(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [(3 * tensor).to(dtype).requires_grad_() for tensor in drawn]


def angles(dtype: torch.dtype) -> torch.Tensor:
    positions = torch.linspace(0, 9, 7 * 5, dtype=torch.float64).view(1, 7, 5)
    precise = torch.promote_types(dtype, torch.float32)
    return torch.stack([positions.cos(), positions.sin()]).to(precise)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_is_pytorchs_to_the_last_bit_and_its_gradients_round_no_more(
    dtype: torch.dtype,
) -> None:
    x, weight = inputs_of(dtype, (3, 5, DIM), (DIM,))
    ours, plain = with_gradients(normed, x, weight), with_gradients(plain_norm, x, weight)
    assert torch.equal(ours[0], plain[0])
    exact = with_gradients(plain_norm, x.detach().double().requires_grad_(),
                           weight.detach().double().requires_grad_())  # fmt: skip
    for got, theirs, true in zip(ours, plain, exact, strict=True):
        error, allowed = ((found - true).abs().max().item() for found in (got, theirs))
        assert error <= 1.5 * allowed + 4 * torch.finfo(dtype).eps * true.abs().max().item()
        assert got.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rotation_is_the_plain_formula_to_the_last_bit(dtype: torch.dtype) -> None:
    (x,) = inputs_of(dtype, (2, 7, 3, 10))
    rope = angles(dtype)
    ours, plain = with_gradients(apply_rope, x, rope), with_gradients(plain_rope, x, rope)
    assert len(ours) == 2
    assert all(map(torch.equal, ours, plain))


@pytest.mark.parametrize(
    ("op", "inputs"),
    [
        (normed, inputs_of(torch.float64, (2, 3, DIM), (DIM,))),
        (apply_rope, [*inputs_of(torch.float64, (2, 7, 1, 10)), angles(torch.float64)]),
    ],
)
def test_backward_is_the_derivative(op: Op, inputs: list[Any]) -> None:
    assert torch.autograd.gradcheck(op, inputs)
