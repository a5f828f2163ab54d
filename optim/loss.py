"""Vocabulary-parallel cross entropy whose backward overwrites the logits with their gradient."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Shard

from config.job_config import Compile
from runtime.labels import IGNORE_INDEX

# Logits per chunk: enough to keep a GPU busy, or as many as fit a CPU's cache.
CHUNK, CPU_CHUNK = 1 << 24, 1 << 19


def cross_entropy_sum(
    logits: torch.Tensor,
    labels: torch.Tensor,
    divisor: float | torch.Tensor = 1,
    compile: Compile | None = None,
) -> torch.Tensor:
    """Return the cross entropy in nats, summed over valid labels, divided by ``divisor``; 0-d.

    logits (b, s, vocab_size), labels (b, s) int64; ``IGNORE_INDEX`` is not valid. The result is at
    least float32. ``divisor``: the step's global count of valid labels, a number or 0-d, so that
    the scale does not depend on any degree of parallelism. Logits sharded over the vocabulary are
    not gathered (Megatron-LM, arXiv 1909.08053, section 3), and the call is then collective.

    Mutates ``logits`` in backward: their gradient overwrites them. Nothing else of their size is
    allocated, neither float32 copies of bfloat16 logits nor probabilities. In autograd, the
    backward of an operation that saved them then raises.
    """
    group, start, whole = None, 0, logits
    if isinstance(logits, DTensor):
        (placement,), mesh = logits.placements, logits.device_mesh
        logits = logits.to_local()
        if not placement.is_replicate():
            assert placement == Shard(logits.ndim - 1), "logits are sharded over the vocabulary"
            assert whole.shape[-1] % mesh.size() == 0, "the vocabulary has unequal shards"
            group, start = mesh.get_group(), mesh.get_local_rank() * logits.shape[-1]
    # Unfused, each pass would materialize its result for all rows at once.
    is_fused = compile is not None and compile.enable and compile.backend == "inductor"
    # A list hides it from autograd.
    return _CrossEntropySum.apply(logits, labels, divisor, group, start, is_fused, [whole])


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        divisor: float | torch.Tensor,
        group: dist.ProcessGroup | None,
        start: int,
        is_fused: bool,
        whole: list[torch.Tensor],
    ) -> torch.Tensor:
        """Return the 0-d loss. ``logits``: this rank's shard, of token ids from ``start`` on, of
        those in ``whole``."""
        rows, labels = logits.detach().flatten(0, -2), labels.flatten()
        row_max = rows.amax(-1).to(torch.promote_types(rows.dtype, torch.float32))
        if group is not None:
            dist.all_reduce(row_max, dist.ReduceOp.MAX, group)
        if isinstance(divisor, torch.Tensor):
            divisor = divisor.to(row_max.dtype)
        is_local = (labels >= start) & (labels < start + rows.shape[1])
        at = torch.arange(len(rows), device=rows.device), torch.where(is_local, labels - start, 0)
        target = torch.where(is_local, rows[at] - row_max, 0.0)
        sum_exp = torch.empty_like(row_max)
        for_row_chunks(_sum_exp, rows, row_max, sum_exp, is_fused)
        if group is not None:
            both = torch.stack([sum_exp, target])
            dist.all_reduce(both, group=group)
            sum_exp, target = both
        is_valid = labels != IGNORE_INDEX
        # On ctx, not by save_for_backward, which would take a DTensor's local tensor for modified.
        ctx.rows, ctx.shape, ctx.is_fused, ctx.whole = rows, logits.shape, is_fused, whole[0]
        scale = is_valid / (sum_exp * divisor)
        target_grad = target.exp() * scale - is_local.to(sum_exp.dtype) / divisor
        ctx.save_for_backward(row_max, scale, is_local, target_grad, *at)
        return torch.where(is_valid, sum_exp.log() - target, 0.0).sum() / divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (rows, whole), ctx.rows, ctx.whole = (ctx.rows, ctx.whole), None, None
        row_max, scale, is_local, target_grad, *at = ctx.saved_tensors
        for_row_chunks(_write_gradient, rows, row_max, scale * gradient, ctx.is_fused)
        # A DTensor does not notice that its local tensor changes.
        increment_version(whole)
        target_grad = (target_grad * gradient).to(rows.dtype)
        rows[tuple(at)] = torch.where(is_local, target_grad, rows[tuple(at)])
        return rows.view(ctx.shape), None, None, None, None, None, None


def _sum_exp(
    rows: torch.Tensor, row_max: torch.Tensor, sum_exp: torch.Tensor, scratch: torch.Tensor | None
) -> None:
    """Write the sum of exp(rows - row_max) to ``sum_exp``, in the dtype of ``row_max``."""
    sum_exp.copy_(torch.sub(rows, row_max[:, None], out=scratch).exp_().sum(-1))


def _write_gradient(
    rows: torch.Tensor, row_max: torch.Tensor, scale: torch.Tensor, scratch: torch.Tensor | None
) -> None:
    """Overwrite ``rows`` with their gradient, without the target's term. Rounds it once."""
    shifted = torch.sub(rows, row_max[:, None], out=scratch)
    torch.mul(shifted.exp_(), scale[:, None], out=rows)


def for_row_chunks(
    function: Callable[..., None],
    rows: torch.Tensor,
    row_max: torch.Tensor,
    per_row: torch.Tensor,
    is_fused: bool,
) -> None:
    """Call ``function`` on all rows at once if it is compiled, else on chunks of rows."""
    if is_fused:
        return _compiled(function)(rows, row_max, per_row, None)
    n = max(1, (CPU_CHUNK if rows.is_cpu else CHUNK) // rows.shape[1])
    # One buffer for all chunks: one per chunk, between live tensors, would fragment memory.
    scratch = row_max.new_empty(min(n, len(rows)), rows.shape[1])
    for chunk in zip(rows.split(n), row_max.split(n), per_row.split(n), strict=True):
        function(*chunk, scratch[: len(chunk[0])])


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=False)
