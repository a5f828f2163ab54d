"""Tests of the order of additions; tests/reliability compares whole runs."""

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from parallelisms.elastic import PairwiseGradientAccumulator, PairwiseReduceScatter
from tests.lib.ranks import RankPool

# Values whose sum in float32 depends on the order.
SLOTS = torch.randn(8, 1000, generator=torch.Generator().manual_seed(0)) ** 9


def pairwise(slots: torch.Tensor) -> torch.Tensor:
    """Add ``slots`` (n, ...) pairwise, by definition."""
    if len(slots) == 1:
        return slots[0]
    half = len(slots) // 2
    return pairwise(slots[:half]) + pairwise(slots[half:])


def accumulate(grads: torch.Tensor, reduce_dtype: torch.dtype | None = None) -> torch.Tensor:
    parameter = nn.Parameter(torch.zeros_like(grads[0]))
    tree = PairwiseGradientAccumulator([parameter], reduce_dtype)
    for index, grad in enumerate(grads):
        assert parameter.grad is None
        parameter.grad = grad.clone()
        tree.end_microbatch(is_last=index == len(grads) - 1)
    assert parameter.grad is not None
    return parameter.grad


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_microbatches_are_added_pairwise(count: int) -> None:
    assert torch.equal(accumulate(SLOTS[:count]), pairwise(SLOTS[:count]))


def test_parameter_without_a_gradient_keeps_none() -> None:
    used, unused = (nn.Parameter(torch.zeros(1000)) for _ in range(2))
    tree = PairwiseGradientAccumulator([used, unused], None)
    for index, grad in enumerate(SLOTS[:4]):
        used.grad = grad.clone() if index != 1 else None
        tree.end_microbatch(is_last=index == 3)
    assert used.grad is not None
    assert torch.equal(used.grad, SLOTS[0] + (SLOTS[2] + SLOTS[3]))
    assert unused.grad is None


def test_order_changes_the_sum() -> None:
    one_by_one = SLOTS[0].clone()
    for slot in SLOTS[1:]:
        one_by_one += slot
    assert not torch.equal(one_by_one, pairwise(SLOTS))


def test_sums_are_rounded_to_reduce_dtype() -> None:
    rounded = SLOTS.bfloat16()
    found = accumulate(rounded.float(), torch.bfloat16)
    assert found.dtype == torch.float32
    assert torch.equal(found, pairwise(rounded).float())


def test_three_microbatches_are_rejected() -> None:
    with pytest.raises(AssertionError, match="3 microbatches are not a power of two"):
        accumulate(SLOTS[:3])


def reduce_scatter(dtype: torch.dtype) -> torch.Tensor:
    rank, count = dist.get_rank(), dist.get_world_size()
    output = torch.empty(SLOTS.shape[1] // count, dtype=dtype)
    PairwiseReduceScatter()(output, SLOTS[rank].to(dtype), dist.group.WORLD, dist.ReduceOp.SUM)
    return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_ranks_are_added_pairwise(ranks: RankPool, dtype: torch.dtype) -> None:
    for count in (1, 4):
        whole = torch.cat(ranks.run(reduce_scatter, count, dtype))
        assert torch.equal(whole, pairwise(SLOTS[:count].to(dtype)))


def test_three_ranks_are_rejected(ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match="3 ranks are not a power of two"):
        ranks.run(reduce_scatter, 3, torch.float32)
