"""Dropless mixture of experts: a router sends each token to its top-k experts.

b batch, s sequence, n tokens, e experts, k experts per token (``top_k``), d model dim, h hidden
dim of an expert.
"""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from models.dtensor import to_local_with_partial_grad
from models.transformer import InitFn


class Experts(nn.Module):
    """SwiGLU feed-forwards, stacked on dim 0: w1 and w3 (e, h, d), w2 (e, d, h)."""

    def __init__(self, n_experts: int, top_k: int, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(n_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(n_experts, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(n_experts, hidden_dim, dim))
        self.active_share = top_k / n_experts
        """Fraction of these weights that one token uses."""
        self.is_grouped = True
        """True if bfloat16 uses grouped_mm instead of a loop over experts."""
        self.grouped_device_type = "cuda"
        """Type of the devices on which it does."""

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Map x (n, d) to (n, d).

        x is a concatenation of runs, each sorted by expert; counts (runs, e) int64.
        """
        if len(counts) == 1:
            return self._swiglu(x, counts[0])
        expert_ids = torch.arange(counts.shape[1], device=x.device).repeat(len(counts))
        expert_ids = expert_ids.repeat_interleave(counts.flatten(), output_size=len(x))
        order, inverse = _sort_by_expert(expert_ids, counts.shape[1])
        out = self._swiglu(_Permute.apply(x, order, inverse, 1), counts.sum(dim=0))
        return _Permute.apply(out, inverse, order, 1)

    def _swiglu(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Map x (n, d), sorted by expert, to (n, d); counts (e,)."""
        w1, w2, w3 = (
            to_local_with_partial_grad(self.w1),
            to_local_with_partial_grad(self.w2),
            to_local_with_partial_grad(self.w3),
        )
        # Without any token, grouped_mm returns no gradient (pytorch/pytorch#192497).
        has_kernel = x.device.type == self.grouped_device_type and x.dtype == torch.bfloat16
        if self.is_grouped and has_kernel and len(x) > 0:
            offsets = counts.cumsum(0).to(torch.int32)
            gate = F.grouped_mm(x, w1.transpose(-2, -1), offs=offsets)
            h = F.silu(gate) * F.grouped_mm(x, w3.transpose(-2, -1), offs=offsets)
            return F.grouped_mm(h, w2.transpose(-2, -1), offs=offsets)
        parts = zip(x.split(counts.tolist()), w1, w2, w3, strict=True)
        return torch.cat([F.linear(F.silu(t @ a.t()) * (t @ c.t()), b) for t, a, b, c in parts])

    def init_weights(self, trunc_normal_: InitFn, residual_std: float) -> None:
        trunc_normal_(self.w1, std=0.02)
        trunc_normal_(self.w2, std=residual_std)
        trunc_normal_(self.w3, std=0.02)


class LocalLinear(nn.Linear):
    """Linear layer that computes on local tensors: each rank has its own tokens."""

    def __init__(self, dim: int, out_dim: int) -> None:
        super().__init__(dim, out_dim, bias=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, to_local_with_partial_grad(self.weight))


class LocalDispatcher(nn.Module):
    """Local dispatch to experts; expert parallelism replaces it by an all-to-all."""

    def forward(self, x: torch.Tensor, counts: torch.Tensor, experts: Experts) -> torch.Tensor:
        """Map x (n, d), sorted by expert, to (n, d); counts (e,) of all experts."""
        return experts(x, counts[None])


class MoE(nn.Module):
    """Mixture of experts in place of a block's feed-forward.

    Two methods balance the load: an auxiliary loss per sequence (arXiv 2412.19437, equations 17 to
    20, on softmax scores), times ``balance_weight``; and a router bias that affects only the top-k
    choice, which the training loop updates (arXiv 2408.15664).
    """

    bias: torch.Tensor
    tokens_per_expert: torch.Tensor

    def __init__(
        self,
        *,
        dim: int,
        hidden_dim: int,
        n_experts: int,
        top_k: int,
        balance_weight: float,
    ) -> None:
        super().__init__()
        self.top_k, self.balance_weight = top_k, balance_weight
        self.router = LocalLinear(dim, n_experts)
        self.experts = Experts(n_experts, top_k, dim, hidden_dim)
        self.dispatcher = LocalDispatcher()
        self.all_reduce_counts = nn.Identity()
        """Sum of counts (b, e) over the ranks that share the sequences; here there is one."""
        self.register_buffer("bias", torch.empty(n_experts, dtype=torch.float32))
        self.register_buffer(
            "tokens_per_expert", torch.empty(n_experts, dtype=torch.int64), persistent=False
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x (b, s, d) to (b, s, d). Backward adds to ``tokens_per_expert``."""
        scores, top_experts, weights, counts = self.route(x)
        out = self.apply_experts(x, top_experts, weights, counts)
        return _AddAuxLoss.apply(
            out, self._balance_loss(scores, counts), counts, self.tokens_per_expert
        )

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Route x (b, s, d): return scores, top-k experts, their weights, and token counts.

        Scores (b, s, e), experts and weights (b, s, k), counts (b, e) int64. Weights sum to 1.
        """
        precise = torch.promote_types(x.dtype, torch.float32)
        scores = self.router(x).softmax(dim=-1, dtype=precise)
        top_experts = (scores + self.bias).topk(self.top_k, dim=-1).indices  # (b, s, k)
        weights = scores.gather(-1, top_experts)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        counts = top_experts.new_zeros(len(x), scores.shape[-1])
        counts.scatter_add_(1, top_experts.flatten(1), torch.ones_like(top_experts).flatten(1))
        return scores, top_experts, weights, counts

    def apply_experts(
        self,
        x: torch.Tensor,
        top_experts: torch.Tensor,
        weights: torch.Tensor,
        counts: torch.Tensor,
    ) -> torch.Tensor:
        """Dispatch, compute, combine: (b, s, d). Breaks the graph, as sizes depend on counts."""
        order, inverse = _sort_by_expert(top_experts.flatten(), counts.shape[-1])
        rows = _Permute.apply(x.flatten(0, 1), order, inverse, self.top_k)
        sorted_out = self.dispatcher(rows, counts.sum(dim=0), self.experts)
        out = _Permute.apply(sorted_out, inverse, order, 1).unflatten(0, top_experts.shape)
        return (out * weights[..., None].type_as(x)).sum(dim=-2)

    def _balance_loss(self, scores: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return the auxiliary loss (); this rank's term of it if sequences are sharded."""
        # Validation and samples have no use for it, nor for its all-reduce.
        if self.balance_weight == 0.0 or not torch.is_grad_enabled():
            return scores.new_zeros(())
        counts = self.all_reduce_counts(counts).type_as(scores)
        # Equation 18: each expert's fraction of the tokens, relative to a uniform load.
        fractions = counts * (counts.shape[-1] / counts.sum(dim=-1, keepdim=True))
        seq_len = counts.sum(dim=-1) / self.top_k
        mean_scores = scores.sum(dim=1) / seq_len[:, None]
        return self.balance_weight * (fractions * mean_scores).sum()

    def init_weights(self, trunc_normal_: InitFn, residual_std: float) -> None:
        trunc_normal_(self.router.weight, std=0.02)
        self.experts.init_weights(trunc_normal_, residual_std)
        self.bias.zero_()
        self.tokens_per_expert.zero_()


def _sort_by_expert(experts: torch.Tensor, n_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the permutation (n,) that sorts ``experts`` (n,), and its inverse."""
    # Radix sort makes one pass per byte of the key. The inverse needs no second sort.
    assert n_experts <= torch.iinfo(torch.int16).max
    order = experts.to(torch.int16).argsort(stable=True)
    positions = torch.arange(len(order), device=order.device)
    return order, torch.empty_like(order).scatter_(0, order, positions)


class _Permute(torch.autograd.Function):
    """Permute rows (n, d), each repeated ``copies`` times, to (n copies, d).

    Backward gathers and sums copies; autograd's backward of an index accumulates row by row.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, copies: int
    ) -> torch.Tensor:
        """``order`` (n copies,) indexes ``rows.repeat_interleave(copies)``."""
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return rows[order // copies]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        rows = gradients[0][inverse]
        if ctx.copies > 1:
            rows = rows.unflatten(0, (-1, ctx.copies)).sum(dim=1)
        return rows, None, None, None


class _AddAuxLoss(torch.autograd.Function):
    """Identity on x that adds ``loss`` to the training loss and ``counts`` to the load.

    Both happen in backward, because recomputation may run forward twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        loss: torch.Tensor,
        counts: torch.Tensor,
        tokens_per_expert: torch.Tensor,
    ) -> torch.Tensor:
        ctx.counts, ctx.tokens_per_expert, ctx.one = (
            counts,
            tokens_per_expert,
            torch.ones_like(loss),
        )
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.tokens_per_expert += ctx.counts.sum(dim=0)
        return gradients[0], ctx.one, None, None
