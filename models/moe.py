"""Mixture of experts: each token goes through the few feed-forwards that a router chooses.

Dropless: every token reaches all experts that it chose, whatever their load. n tokens, e experts,
k chosen, d model dim, h hidden dim of an expert.
"""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from models.own_part import own_part
from models.transformer import InitFn


class Experts(nn.Module):
    """SwiGLU feed-forwards, stacked along dim 0."""

    def __init__(self, n_experts: int, n_chosen: int, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(n_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(n_experts, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(n_experts, hidden_dim, dim))
        self.active_share = n_chosen / n_experts
        """The share of these weights that one token is multiplied with."""
        self.is_grouped = True
        """Whether all experts multiply in one kernel, in bfloat16 on a GPU."""

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """x (n, d), in runs that are each sorted by expert; counts (runs, e) int64, each expert's
        tokens in each run. To (n, d)."""
        if len(counts) == 1:
            return self._multiply(x, counts[0])
        owners = torch.arange(counts.shape[1], device=x.device).repeat(len(counts))
        owners = owners.repeat_interleave(counts.flatten(), output_size=len(x))
        order, inverse = _sorted_by(owners, counts.shape[1])
        out = self._multiply(_Take.apply(x, order, inverse, 1), counts.sum(dim=0))
        return _Take.apply(out, inverse, order, 1)

    def _multiply(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """x (n, d), sorted by expert; counts (e,)"""
        w1, w2, w3 = own_part(self.w1), own_part(self.w2), own_part(self.w3)
        # Given no tokens at all, that kernel makes no gradient (pytorch/pytorch#192497).
        if self.is_grouped and x.is_cuda and x.dtype == torch.bfloat16 and len(x) > 0:
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
    """A linear layer on tokens that no other rank has."""

    def __init__(self, dim: int, out_dim: int) -> None:
        super().__init__(dim, out_dim, bias=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, own_part(self.weight))


class InnerExperts(nn.Module):
    """Tokens to experts and back; expert parallel puts its own in place of this."""

    def forward(self, x: torch.Tensor, counts: torch.Tensor, experts: Experts) -> torch.Tensor:
        """x (n, d), sorted by expert; counts (e,) of all experts. To (n, d)."""
        return experts(x, counts[None])


class MoE(nn.Module):
    """In place of a block's feed-forward.

    Two ways to even out the load. A loss per sequence (arXiv 2412.19437, equations 17 to 20, with
    the softmax's scores); ``balance_weight`` is its weight in the step's loss. A bias that only the
    choice of experts sees, which the training loop moves against the load (arXiv 2408.15664).
    """

    bias: torch.Tensor
    load: torch.Tensor

    def __init__(
        self,
        *,
        dim: int,
        hidden_dim: int,
        n_experts: int,
        n_chosen: int,
        balance_weight: float,
    ) -> None:
        super().__init__()
        self.n_chosen, self.balance_weight = n_chosen, balance_weight
        self.router = LocalLinear(dim, n_experts)
        self.experts = Experts(n_experts, n_chosen, dim, hidden_dim)
        self.inner = InnerExperts()
        self.tally = nn.Identity()
        """Counts (b, e) of a part of each sequence to those of all of it; here the part is all."""
        self.register_buffer("bias", torch.empty(n_experts, dtype=torch.float32))
        self.register_buffer("load", torch.empty(n_experts, dtype=torch.int64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(b, s, d) to (b, s, d). Backward adds each expert's tokens to ``load``."""
        scores, chosen, weights, counts = self.route(x)
        out = self.mix_experts(x, chosen, weights, counts)
        return _Balance.apply(out, self._balance_loss(scores, counts), counts, self.load)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """x (b, s, d) to scores (b, s, e), the chosen experts and their weights, whose sum is 1,
        (b, s, k), and each expert's number of tokens (b, e) int64."""
        precise = torch.promote_types(x.dtype, torch.float32)
        scores = self.router(x).softmax(dim=-1, dtype=precise)
        chosen = (scores + self.bias).topk(self.n_chosen, dim=-1).indices  # (b, s, k)
        weights = scores.gather(-1, chosen)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        counts = chosen.new_zeros(len(x), scores.shape[-1])
        counts.scatter_add_(1, chosen.flatten(1), torch.ones_like(chosen).flatten(1))
        return scores, chosen, weights, counts

    def mix_experts(
        self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        """What ``route`` takes and returns, to (b, s, d). Not one graph: sizes depend on counts."""
        order, inverse = _sorted_by(chosen.flatten(), counts.shape[-1])
        rows = _Take.apply(x.flatten(0, 1), order, inverse, self.n_chosen)
        sorted_out = self.inner(rows, counts.sum(dim=0), self.experts)
        out = _Take.apply(sorted_out, inverse, order, 1).unflatten(0, chosen.shape)
        return (out * weights[..., None].type_as(x)).sum(dim=-2)

    def _balance_loss(self, scores: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """The loss of scores (b, s, e); this rank's share where sequences are spread over ranks."""
        if self.balance_weight == 0.0:
            return scores.new_zeros(())
        counts = self.tally(counts).type_as(scores)
        # Each expert's part of the sequence's tokens, over the mean part.
        shares = counts * (counts.shape[-1] / counts.sum(dim=-1, keepdim=True))
        seq_len = counts.sum(dim=-1) / self.n_chosen
        mean_scores = scores.sum(dim=1) / seq_len[:, None]
        return self.balance_weight * (shares * mean_scores).sum()

    def init_weights(self, trunc_normal_: InitFn, residual_std: float) -> None:
        trunc_normal_(self.router.weight, std=0.02)
        self.experts.init_weights(trunc_normal_, residual_std)
        self.bias.zero_()
        self.load.zero_()


def _sorted_by(experts: torch.Tensor, n_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The order (n,) that sorts ``experts`` (n,), and that order's inverse."""
    # Short keys: a sort makes a pass for each byte of them. The inverse needs no second sort.
    assert n_experts <= torch.iinfo(torch.int16).max
    order = experts.to(torch.int16).argsort(stable=True)
    places = torch.arange(len(order), device=order.device)
    return order, torch.empty_like(order).scatter_(0, order, places)


class _Take(torch.autograd.Function):
    """Rows (n, d) in another order, each ``copies`` times, to (n copies, d).

    Backward puts them back and adds up copies; PyTorch's own, of an index, adds row by row, slowly.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, copies: int
    ) -> torch.Tensor:
        """``order`` (n copies,) indexes the copies as if those of a row were side by side."""
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


class _Balance(torch.autograd.Function):
    """Adds a loss where it arises, and counts in backward: forward may run more than once."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, loss: torch.Tensor, counts: torch.Tensor, load: torch.Tensor
    ) -> torch.Tensor:
        ctx.counts, ctx.load, ctx.one = counts, load, torch.ones_like(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.load += ctx.counts.sum(dim=0)
        return gradients[0], ctx.one, None, None
