"""Gated delta net (arXiv 2412.06464): linear attention whose state forgets and corrects itself.

b batch, s sequence, n key heads, r value heads for each, k and v the dims of their heads. What
belongs to a key head is together in every weight, so that heads can be dealt out to ranks.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from models.own_part import own_part

InitFn = Callable[..., object]
CHUNK = 64


class GatedDeltaNet(nn.Module):
    def __init__(
        self,
        *,
        dim: int,
        n_key_heads: int,
        n_value_heads: int,
        key_dim: int,
        value_dim: int,
        conv_size: int,
        norm_eps: float,
    ) -> None:
        super().__init__()
        ratio = n_value_heads // n_key_heads
        self.key_dim, self.value_dim, self.ratio = key_dim, value_dim, ratio
        self.group = 2 * key_dim + ratio * value_dim
        """What a key head has of q, k and v."""
        self.state_size = n_value_heads * key_dim * value_dim
        width = n_key_heads * (self.group + ratio * value_dim)
        self.wqkvz = nn.Linear(dim, width, bias=False)
        self.wba = nn.Linear(dim, 2 * n_value_heads, bias=False)
        self.conv = nn.Parameter(torch.empty(n_key_heads, self.group, conv_size))
        self.a_log = nn.Parameter(torch.empty(n_value_heads))
        self.dt_bias = nn.Parameter(torch.empty(n_value_heads))
        self.inner = InnerDeltaNet(key_dim, value_dim)
        self.norm = GatedNorm(value_dim, norm_eps)
        self.wo = nn.Linear(n_value_heads * value_dim, dim, bias=False)

    def forward(
        self, x: torch.Tensor, rope: torch.Tensor, document_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """(b, s, d) to (b, s, d); the state knows positions by itself, without ``rope``."""
        b, s, _ = x.shape
        qkvz = self.wqkvz(x).view(b, s, -1, self.group + self.ratio * self.value_dim)
        qkv, z = qkvz.split([self.group, self.ratio * self.value_dim], dim=-1)
        beta, a = self.wba(x).view(b, s, -1, 2 * self.ratio).chunk(2, dim=-1)
        gates = torch.stack([beta, a], dim=-1)  # (b, s, n, r, 2)
        of_heads = (own_part(weight) for weight in (self.conv, self.a_log, self.dt_bias))
        out = self.inner(qkv, gates, *of_heads, document_ids)
        out = self.norm(out, z.reshape(b, s, -1, self.value_dim))
        return self.wo(out.reshape(b, s, -1))

    def init_weights(self, trunc_normal_: InitFn, residual_std: float) -> None:
        for weight in (self.wqkvz.weight, self.wba.weight):
            trunc_normal_(weight, std=0.02)
        trunc_normal_(self.conv, std=self.conv.shape[-1] ** -0.5)
        # Decays of 1 to 16, spread evenly: of a normal, what it is in its distribution.
        trunc_normal_(self.a_log, std=1.0)
        self.a_log.copy_((1 + 7.5 * (1 + torch.erf(self.a_log / math.sqrt(2)))).log())
        nn.init.ones_(self.dt_bias)
        nn.init.ones_(self.norm.weight)
        trunc_normal_(self.wo.weight, std=residual_std)


class InnerDeltaNet(nn.Module):
    """What needs the whole sequence, but only its own heads."""

    def __init__(self, key_dim: int, value_dim: int) -> None:
        super().__init__()
        self.key_dim, self.value_dim = key_dim, value_dim

    def forward(
        self,
        qkv: torch.Tensor,
        gates: torch.Tensor,
        conv: torch.Tensor,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        document_ids: torch.Tensor | None,
    ) -> torch.Tensor:
        """qkv (b, s, n, group), gates (b, s, n, r, 2), conv (n, group, size), a_log and dt_bias
        (n * r,), document_ids (b, s) to (b, s, n * r, v)."""
        return self.go_on(qkv, gates, conv, a_log, dt_bias, document_ids, None)[0]

    def go_on(
        self,
        qkv: torch.Tensor,
        gates: torch.Tensor,
        conv: torch.Tensor,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        document_ids: torch.Tensor | None,
        state: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From ``state`` (b, n * r, k, v) on, to what it is at the end too.

        There are gates of the last positions only: what of qkv is before them was seen before, and
        the convolution still sees it. ``document_ids`` (b, s or more) ends where they end.
        """
        precise = torch.promote_types(qkv.dtype, torch.float32)
        mixed = F.silu(causal_conv(qkv, conv, document_ids)[:, -gates.shape[1] :])
        q, k, v = mixed.split([self.key_dim, self.key_dim, mixed.shape[-1] - 2 * self.key_dim], -1)
        ratio = gates.shape[3]
        q, k = (t.repeat_interleave(ratio, dim=2) for t in (q, k))
        v = v.reshape(*q.shape[:3], self.value_dim)
        beta, a = gates.flatten(2, 3).unbind(-1)
        decay = -a_log.to(precise).exp() * F.softplus(a.to(precise) + dt_bias.to(precise))
        q, k, v, beta = (t.to(precise) for t in (q, k, v, beta.sigmoid()))
        out, state = delta_rule(q, k, v, decay, beta, document_ids, state)
        return out.type_as(qkv), state


class GatedNorm(nn.Module):
    """RMSNorm of each head, times silu of its gate."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(dim)), eps

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        precise = torch.promote_types(x.dtype, torch.float32)
        normed = F.rms_norm(x.to(precise), x.shape[-1:], eps=self.eps).type_as(x)
        return (own_part(self.weight) * normed * F.silu(gate.to(precise))).type_as(x)


def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, document_ids: torch.Tensor | None
) -> torch.Tensor:
    """Each channel's sum over its last few positions, within documents.

    x (b, s, n, c), weight (n, c, size); its last column is for the position itself.
    """
    size, s = weight.shape[-1], x.shape[1]
    if document_ids is not None:
        document_ids = document_ids[:, -s:]
    out = x * weight[..., -1]
    for back in range(1, min(size, s)):
        earlier = x[:, : s - back]
        if document_ids is not None:
            is_same = document_ids[:, back:] == document_ids[:, : s - back]
            earlier = earlier * is_same[:, :, None, None]
        out = out + F.pad(earlier * weight[..., -1 - back], (0, 0, 0, 0, back, 0))
    return out


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    document_ids: torch.Tensor | None,
    state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k (b, s, h, k), v (b, s, h, v), decay and beta (b, s, h) to (b, s, h, v) and the state.

    State S (k, v) of each head: S = e^decay S; S += k (beta (v - S'k))'; out = S'q, from zero in
    each document. In chunks (section 3.3 of arXiv 2412.06464): one triangular system each.
    A ``state`` (b, h, k, v) to go on from is that of the position before, which ``document_ids``
    (b, s or more) has too.
    """
    b, s, h, _ = q.shape
    if document_ids is None:
        document_ids = torch.zeros(b, s, dtype=torch.int64, device=q.device)
    q, k = (t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for t in (q, k))
    q = q * q.shape[-1] ** -0.5
    if state is None:
        state = q.new_zeros(b, h, k.shape[-1], v.shape[-1])
    chunk = min(CHUNK, s)
    missing = -s % chunk
    q, k, v, decay, beta = (t.transpose(1, 2) for t in (q, k, v, decay, beta))
    if missing:
        # Positions after the end that neither add nor forget anything.
        q, k, v = (F.pad(t, (0, 0, 0, missing)) for t in (q, k, v))
        decay, beta = (F.pad(t, (0, missing)) for t in (decay, beta))
    # (b, h, chunks, c, ...)
    q, k, v, decay, beta = (t.unflatten(2, (-1, chunk)) for t in (q, k, v, decay, beta))
    document_ids = document_ids[:, -(s + 1) :]
    ids = torch.cat([document_ids[:, -s:], document_ids[:, -1:].expand(-1, missing)], dim=1)
    ids = ids.unflatten(1, (-1, chunk))
    before = torch.cat([document_ids[:, :1], ids[:, :-1, -1]], dim=1)
    # GPUs have no deterministic kernel for a cumulative sum.
    total = decay[..., None, :].expand(*decay.shape, chunk).tril().sum(-1)
    is_same = (ids[..., :, None] == ids[..., None, :]).tril()[:, None]
    between = total[..., :, None] - total[..., None, :]
    weights = between.masked_fill(~is_same, -math.inf).exp()
    # What of the state before the chunk a position still sees.
    into = (total.exp() * (ids == before[..., None])[:, None])[..., None]
    kb = k * beta[..., None]
    system, wanted = (kb @ k.mT) * weights, torch.cat([kb * into, v * beta[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    seen, own = solved.split([k.shape[-1], v.shape[-1]], dim=-1)
    kept, decayed = (weights[..., -1, :, None] * k).mT, into[..., -1:, :]
    parts = (t.flatten(0, 1) for t in (seen, own, kept, decayed, state))
    states, updates, state = (t.unflatten(0, (b, h)) for t in _go_through(*parts))
    out = (q * into) @ states + ((q @ k.mT) * weights) @ updates
    return out.flatten(2, 3)[:, :, :s].transpose(1, 2), state


# All that is done one after the other. One operation, or compilers would unroll it.
@torch.library.custom_op("shardloom::go_through_chunks", mutates_args=())
def _go_through(
    seen: torch.Tensor,
    own: torch.Tensor,
    kept: torch.Tensor,
    decay: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The states S before each of n chunks (b, n, k, v), the update U = own - seen S of each
    (b, n, c, v), and the last state (b, k, v); the next S is decay S + kept U.

    seen (b, n, c, k), own (b, n, c, v), kept (b, n, k, c), decay (b, n, 1, 1), state (b, k, v)
    """
    states, updates, last = _empty(own, state)
    follow = [*states.unbind(1), last]
    follow[0].copy_(state)
    for i, update in enumerate(updates.unbind(1)):
        torch.baddbmm(own[:, i], seen[:, i], follow[i], alpha=-1, out=update)
        torch.mul(follow[i], decay[:, i], out=follow[i + 1]).baddbmm_(kept[:, i], update)
    return states, updates, last


@_go_through.register_fake
def _(
    seen: torch.Tensor,
    own: torch.Tensor,
    kept: torch.Tensor,
    decay: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _empty(own, state)


def _empty(
    own: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    states = own.new_empty(*own.shape[:2], *state.shape[1:])
    return states, own.new_empty(own.shape), state.new_empty(state.shape)


@torch.library.custom_op("shardloom::go_back_through_chunks", mutates_args=())
def _go_back(
    of_states: torch.Tensor,
    of_updates: torch.Tensor,
    of_last: torch.Tensor,
    seen: torch.Tensor,
    kept: torch.Tensor,
    decay: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of what ``_go_through`` returned, with what came of them by what followed."""
    of_states, of_updates, of_last = (
        t.clone(memory_format=torch.contiguous_format) for t in (of_states, of_updates, of_last)
    )
    follow = [*of_states.unbind(1), of_last]
    for i, update in reversed(list(enumerate(of_updates.unbind(1)))):
        update.baddbmm_(kept[:, i].mT, follow[i + 1])
        follow[i].addcmul_(follow[i + 1], decay[:, i])
        follow[i].baddbmm_(seen[:, i].mT, update, alpha=-1)
    return of_states, of_updates, of_last


@_go_back.register_fake
def _(
    of_states: torch.Tensor,
    of_updates: torch.Tensor,
    of_last: torch.Tensor,
    seen: torch.Tensor,
    kept: torch.Tensor,
    decay: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _empty(of_updates, of_last)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    seen, _, kept, decay, _ = inputs
    ctx.save_for_backward(seen, kept, decay, *output[:2])


@once_differentiable
def _backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
    seen, kept, decay, states, updates = ctx.saved_tensors
    of_states, of_own, of_last = _go_back(*gradients, seen, kept, decay)
    of_next = torch.cat([of_states[:, 1:], of_last[:, None]], dim=1)
    of_decay = (of_next * states).sum((-2, -1), keepdim=True)
    return -of_own @ states.mT, of_own, of_next @ updates.mT, of_decay, of_states[:, 0]


_go_through.register_autograd(_backward, setup_context=_keep)
