from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from runtime.labels import IGNORED

# Logits that are worked on at once: in float32, 64 MiB.
CHUNK = 1 << 24


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor, divisor: int = 1) -> torch.Tensor:
    """Cross entropy in nats, summed over the labels that are not ``IGNORED``, over ``divisor``.

    logits (b, s, vocab_size), labels (b, s) int64. At least float32. The caller divides by the
    step's global count of valid labels, so that no degree of parallelism enters the scale. Logits
    that are sharded over the vocabulary stay so (Megatron-LM, arXiv 1909.08053, section 3).

    Overwrites logits that need a gradient with it, so that there is nothing else of their size: of
    bfloat16 logits, neither float32 copies nor probabilities.
    """
    group, first = None, 0
    if isinstance(logits, DTensor):
        mesh = logits.device_mesh
        assert logits.shape[-1] % mesh.size() == 0, "ranks have unequal parts of the vocabulary"
        logits = logits.to_local()
        group, first = mesh.get_group(), mesh.get_local_rank() * logits.shape[-1]
    return _CrossEntropySum.apply(logits, labels, divisor, group, first)


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        divisor: int,
        group: dist.ProcessGroup | None,
        first: int,
    ) -> torch.Tensor:
        """``logits`` are those of the ids from ``first`` on; the other ranks of ``group`` have the
        others."""
        rows, n_ids = logits.detach().flatten(0, -2), logits.shape[-1]
        n = max(1, CHUNK // n_ids)
        losses = []
        for part, label in zip(rows.split(n), labels.flatten().split(n), strict=True):
            peak = part.amax(-1).to(torch.promote_types(part.dtype, torch.float32))
            if group is not None:
                dist.all_reduce(peak, dist.ReduceOp.MAX, group)
            # In the precision of the peak, without a copy of the part in it.
            shifted = part - peak[:, None]
            is_own = (label >= first) & (label < first + n_ids)
            index = torch.where(is_own, label - first, 0)[:, None]
            target = shifted.gather(1, index)[:, 0] * is_own
            total = shifted.exp_().sum(-1)
            if group is not None:
                sums = torch.stack([total, target])
                dist.all_reduce(sums, group=group)
                total, target = sums
            is_valid = label != IGNORED
            losses.append(torch.where(is_valid, total.log() - target, 0.0).sum())
            if ctx.needs_input_grad[0]:
                # Scaled before it is rounded.
                shifted.mul_((is_valid / (total * divisor))[:, None])
                shifted.scatter_add_(1, index, -(is_own / divisor).to(shifted.dtype)[:, None])
                part.copy_(shifted)
        # Not a saved tensor: as the local part of a DTensor it would count as changed unseen.
        ctx.gradient = rows.view_as(logits)
        return torch.stack(losses).sum() / divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        own, ctx.gradient = ctx.gradient, None
        return own.mul_(gradient), None, None, None, None
