"""Elastic determinism: add gradients in the same order on any number of data-parallel ranks.

Microbatch ``a`` of rank ``r`` is slot a * degree + r of the step, and slots are added pairwise:
((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). The microbatches that ranks run at the same time are
neighboring slots, so the lower levels of that tree are between ranks and the upper ones between
microbatches. Degrees and numbers of microbatches are powers of two.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from runtime.dtensor import to_local
from runtime.log import logger


def apply_elastic(model: nn.Module) -> None:
    """Make all FSDP2 modules of ``model`` add gradients pairwise over ranks. Mutates ``model``."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.set_custom_reduce_scatter(cast(Any, PairwiseReduceScatter()))
    logger.info("elastic: pairwise reduce-scatter in %d modules", len(modules))


class PairwiseReduceScatter:
    """A reduce-scatter that adds as a binary tree in rank order.

    The order inside a backend's own reduce-scatter depends on the number of ranks and on the
    position in the buffer. This one sends the same bytes, but holds a unit's unsharded gradients
    twice. Each sum is rounded to the dtype of the buffers.
    """

    def allocate(
        self,
        size: Sequence[int | torch.SymInt],
        *,
        dtype: torch.dtype,
        device: torch.device,
        **others: Any,
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
        **others: Any,
    ) -> None:
        """Sum input_tensor (ranks * n,) into output_tensor (n,). Collective."""
        assert op == dist.ReduceOp.SUM, "sums are not scaled"
        assert not async_op, "FSDP2 gives the collective a stream of its own"
        assert group.size().bit_count() == 1, f"{group.size()} ranks are not a power of two"
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        sums = received.view(group.size(), -1)  # (ranks, n), then (ranks / 2, n), ...
        while len(sums) > 1:
            sums = sums[::2].add_(sums[1::2])
        output_tensor.copy_(sums[0])


class PairwiseGradientAccumulator:
    """Adds the microbatches' gradients as a binary tree; FSDP2 would add each to a running sum.

    Keeps one partial sum, as large as the sharded gradients, for each level of the tree.
    """

    def __init__(self, parameters: list[nn.Parameter], reduce_dtype: torch.dtype | None) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._reduce_dtype = reduce_dtype
        # One for each level of the tree that waits for its right half, the widest first.
        self._sums: list[list[torch.Tensor | None]] = []
        self._count = 0

    @torch.no_grad()
    def end_microbatch(self, *, is_last: bool) -> None:
        """Move a backward's gradients into the tree; after the last, set ``grad`` to the total."""
        self._count += 1
        total = [_take_grad(parameter) for parameter in self._parameters]
        # As in binary addition: each trailing zero of the count is a pair of equal subtrees.
        carry = self._count
        while carry % 2 == 0:
            total = [self._add(*pair) for pair in zip(self._sums.pop(), total, strict=True)]
            carry //= 2
        self._sums.append(total)
        if not is_last:
            return
        assert self._count.bit_count() == 1, f"{self._count} microbatches are not a power of two"
        for parameter, grad in zip(self._parameters, self._sums.pop(), strict=True):
            parameter.grad = grad
        self._count = 0

    def _add(self, left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
        """Add ``right`` to ``left`` in place, rounded as the sums between ranks are.

        A parameter that took no part in the loss of a microbatch has no gradient.
        """
        if left is None or right is None:
            return right if left is None else left
        sums = to_local(left)
        sums += to_local(right)
        if self._reduce_dtype not in (None, sums.dtype):
            sums.copy_(sums.to(self._reduce_dtype))
        return left


def _take_grad(parameter: nn.Parameter) -> torch.Tensor | None:
    grad, parameter.grad = parameter.grad, None
    return grad
