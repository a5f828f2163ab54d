"""The exact norm is correct, and bitwise equal for any order and split."""

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


def reshard(values: torch.Tensor, seed: int) -> list[torch.Tensor]:
    """All values in another order and split; some shards are empty."""
    generator = torch.Generator().manual_seed(seed)
    splits = torch.randint(len(values), (9,), generator=generator).sort().values
    shuffled = values[torch.randperm(len(values), generator=generator)]
    return [*shuffled.tensor_split(splits), values[:0]]


@pytest.mark.parametrize("build", GRADIENTS.values(), ids=GRADIENTS)
def test_exact_norm_is_correct(build: Callable[[], torch.Tensor]) -> None:
    values = build()
    want = math.sqrt(math.fsum(x * x for x in values.tolist()))
    for n_elements in (len(values), 2**31, 10**12):
        got = exact_norm({(): [values]}, n_elements).item()
        assert abs(got - want) <= 1e-12 * want, n_elements


@pytest.mark.parametrize("build", GRADIENTS.values(), ids=GRADIENTS)
def test_norm_independent_of_order_and_split(build: Callable[[], torch.Tensor]) -> None:
    values = build()
    norms = {exact_norm({(): reshard(values, seed)}, len(values)).item() for seed in range(10)}
    assert len(norms) == 1


def test_pytorch_norm_depends_on_order() -> None:
    def norm(parts: list[torch.Tensor]) -> float:
        filled = [part for part in parts if part.numel()]
        return torch.stack(torch._foreach_norm(filled, 2.0)).square().sum().item()

    assert len({norm(reshard(normal(), seed)) for seed in range(10)}) > 1


def test_level_sums_do_not_overflow() -> None:
    # Equal values are the worst case. Between 2**k - 1 and 2**k elements a level's width changes.
    for n in (1, 2, 3, 2**16 - 1, 2**16, 2**16 + 1):
        want = 3.0 * math.sqrt(n)
        assert exact_norm({(): [torch.full((n,), -3.0)]}, n).item() == pytest.approx(
            want, rel=1e-15
        )


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_nonfinite_gradient_makes_norm_infinite(bad: float) -> None:
    for index in (0, N - 1):
        values = normal()
        values[index] = bad
        assert exact_norm({(): [values, normal()]}, 2 * N).item() == math.inf


def test_norm_of_zeros_or_no_elements_is_zero() -> None:
    assert exact_norm({(): [torch.zeros(3), torch.zeros(0)]}, 3).item() == 0.0
    assert exact_norm({(): [torch.zeros(0)]}, 3).item() == 0.0
