"""The exact norm is right, and has the same bits in any order and partition."""

import math
from collections.abc import Callable

import pytest
import torch

from optim.exact_norm import exact_norm

N = 50_000


def normal() -> torch.Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(0))


GRADIENTS: dict[str, Callable[[], torch.Tensor]] = {
    "normal": normal,
    "float64": lambda: normal().double() * math.pi,
    "bfloat16": lambda: normal().bfloat16(),
    "of many sizes": lambda: normal() * torch.logspace(-12, 2, N),
    "one large": lambda: torch.cat([torch.tensor([1e6]), normal()]),
    "denormal": lambda: normal() * 1e-40,
    "almost too large": lambda: normal() * 1e37,
    "equal": lambda: torch.full((2**16,), 0.7),
}


def pieces(values: torch.Tensor, seed: int) -> list[torch.Tensor]:
    """All values in another order and cut elsewhere; some pieces are empty."""
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.randint(len(values), (9,), generator=generator).sort().values
    shuffled = values[torch.randperm(len(values), generator=generator)]
    return [*shuffled.tensor_split(cuts), values[:0]]


@pytest.mark.parametrize("build", GRADIENTS.values(), ids=GRADIENTS)
def test_is_the_norm(build: Callable[[], torch.Tensor]) -> None:
    values = build()
    want = math.sqrt(math.fsum(x * x for x in values.tolist()))
    for n_elements in (len(values), 2**31, 10**12):
        got = exact_norm({(): [values]}, n_elements).item()
        assert abs(got - want) <= 1e-12 * want, n_elements


@pytest.mark.parametrize("build", GRADIENTS.values(), ids=GRADIENTS)
def test_the_order_changes_no_bit(build: Callable[[], torch.Tensor]) -> None:
    values = build()
    norms = {exact_norm({(): pieces(values, seed)}, len(values)).item() for seed in range(10)}
    assert len(norms) == 1


def test_an_ordinary_norm_has_an_order() -> None:
    def norm(parts: list[torch.Tensor]) -> float:
        filled = [part for part in parts if part.numel()]
        return torch.stack(torch._foreach_norm(filled, 2.0)).square().sum().item()

    assert len({norm(pieces(normal(), seed)) for seed in range(10)}) > 1


def test_no_sum_overflows() -> None:
    # Equal values are all the largest; at 2**k - 1 and 2**k elements the width of a level changes.
    for n in (1, 2, 3, 2**16 - 1, 2**16, 2**16 + 1):
        want = 3.0 * math.sqrt(n)
        assert exact_norm({(): [torch.full((n,), -3.0)]}, n).item() == pytest.approx(
            want, rel=1e-15
        )


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_makes_the_norm_infinite(bad: float) -> None:
    for place in (0, N - 1):
        values = normal()
        values[place] = bad
        assert exact_norm({(): [values, normal()]}, 2 * N).item() == math.inf


def test_zeros_and_nothing_are_zero() -> None:
    assert exact_norm({(): [torch.zeros(3), torch.zeros(0)]}, 3).item() == 0.0
    assert exact_norm({(): [torch.zeros(0)]}, 3).item() == 0.0
