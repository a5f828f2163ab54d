"""Cross entropy whose gradient takes the place of the logits, on one rank or over a vocabulary
that ranks share."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from config.job_config import Compile
from runtime.labels import IGNORED

# Logits that are worked on at once: as many as keep a GPU busy, or fit a CPU's cache.
CHUNK, CPU_CHUNK = 1 << 24, 1 << 19


def cross_entropy_sum(
    logits: torch.Tensor, labels: torch.Tensor, divisor: int = 1, compile: Compile | None = None
) -> torch.Tensor:
    """Cross entropy in nats, summed over the labels that are not ``IGNORED``, over ``divisor``.

    logits (b, s, vocab_size), labels (b, s) int64. At least float32. The caller divides by the
    step's global count of valid labels, so that no degree of parallelism enters the scale. Logits
    that are sharded over the vocabulary stay so (Megatron-LM, arXiv 1909.08053, section 3).

    Backward overwrites the logits with their gradient, so that there is nothing else of their size:
    of bfloat16 logits, neither float32 copies nor probabilities.
    """
    group, first = None, 0
    if isinstance(logits, DTensor):
        mesh = logits.device_mesh
        assert logits.shape[-1] % mesh.size() == 0, "ranks have unequal parts of the vocabulary"
        logits = logits.to_local()
        group, first = mesh.get_group(), mesh.get_local_rank() * logits.shape[-1]
    # Without fusion, each pass would materialize its result for all rows at once.
    is_fused = compile is not None and compile.enable and compile.backend == "inductor"
    return _CrossEntropySum.apply(logits, labels, divisor, group, first, is_fused)


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        divisor: int,
        group: dist.ProcessGroup | None,
        first: int,
        is_fused: bool,
    ) -> torch.Tensor:
        """``logits`` are those of the ids from ``first`` on; the other ranks of ``group`` have the
        others."""
        rows, labels = logits.detach().flatten(0, -2), labels.flatten()
        peak = rows.amax(-1).to(torch.promote_types(rows.dtype, torch.float32))
        if group is not None:
            dist.all_reduce(peak, dist.ReduceOp.MAX, group)
        is_own = (labels >= first) & (labels < first + rows.shape[1])
        at = torch.arange(len(rows), device=rows.device), torch.where(is_own, labels - first, 0)
        target = torch.where(is_own, rows[at] - peak, 0.0)
        total = torch.empty_like(peak)
        _each_row(_sum_exp, rows, peak, total, is_fused)
        if group is not None:
            sums = torch.stack([total, target])
            dist.all_reduce(sums, group=group)
            total, target = sums
        is_valid = labels != IGNORED
        # Not saved tensors: rows, as a DTensor's local part, would count as modified since.
        ctx.rows, ctx.shape, ctx.is_fused = rows, logits.shape, is_fused
        scale = is_valid / (total * divisor)
        of_target = target.exp() * scale - is_own.to(total.dtype) / divisor
        ctx.save_for_backward(peak, scale, is_own, of_target, *at)
        return torch.where(is_valid, total.log() - target, 0.0).sum() / divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, ctx.rows = ctx.rows, None
        peak, scale, is_own, of_target, *at = ctx.saved_tensors
        _each_row(_write_gradient, rows, peak, scale * gradient, ctx.is_fused)
        of_target = (of_target * gradient).to(rows.dtype)
        rows[tuple(at)] = torch.where(is_own, of_target, rows[tuple(at)])
        return rows.view(ctx.shape), None, None, None, None, None


def _sum_exp(
    rows: torch.Tensor, peak: torch.Tensor, total: torch.Tensor, scratch: torch.Tensor | None
) -> None:
    """Write ``total``, in the precision of the peak but without a copy of all rows in it."""
    total.copy_(torch.sub(rows, peak[:, None], out=scratch).exp_().sum(-1))


def _write_gradient(
    rows: torch.Tensor, peak: torch.Tensor, scale: torch.Tensor, scratch: torch.Tensor | None
) -> None:
    """Overwrite the rows, as if no column were the target's. Scaled before it is rounded."""
    shifted = torch.sub(rows, peak[:, None], out=scratch)
    torch.mul(shifted.exp_(), scale[:, None], out=rows)


def _each_row(
    function: Callable[..., None],
    rows: torch.Tensor,
    peak: torch.Tensor,
    other: torch.Tensor,
    is_fused: bool,
) -> None:
    """Call ``function`` with all rows if it is fused into one pass over them, else with a few."""
    if is_fused:
        return _compiled(function)(rows, peak, other, None)
    n = max(1, (CPU_CHUNK if rows.is_cpu else CHUNK) // rows.shape[1])
    # One buffer for all parts: one for each, between tensors that stay, would fragment memory.
    scratch = peak.new_empty(min(n, len(rows)), rows.shape[1])
    for parts in zip(rows.split(n), peak.split(n), other.split(n), strict=True):
        function(*parts, scratch[: len(parts[0])])


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=False)
