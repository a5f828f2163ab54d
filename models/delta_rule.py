"""The gated delta rule, in chunks (section 3.3 of arXiv 2412.06464).

Within a chunk, positions depend on each other through a triangular system; those of all chunks are
solved at once. Chunks depend on each other through the state alone, computed one after the other.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

CHUNK = 64


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
    each document. To go on, pass the ``state`` (b, h, k, v) that came last, and ``document_ids``
    (b, s + 1 or more) from the position before on. All is computed in float32 at least, and the
    state is returned so.
    """
    b, s, h, _ = q.shape
    dtype = q.dtype
    precise = torch.promote_types(dtype, torch.float32)
    q, k, v, decay, beta = (t.to(precise) for t in (q, k, v, decay, beta))
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
    # How much of the state before the chunk each position still sees.
    into = (total.exp() * (ids == before[..., None])[:, None])[..., None]
    kb = k * beta[..., None]
    system, wanted = (kb @ k.mT) * weights, torch.cat([kb * into, v * beta[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    seen, own = solved.split([k.shape[-1], v.shape[-1]], dim=-1)
    kept, decayed = (weights[..., -1, :, None] * k).mT, into[..., -1:, :]
    parts = (t.flatten(0, 1) for t in (seen, own, kept, decayed, state))
    states, updates, state = (t.unflatten(0, (b, h)) for t in _go_through(*parts))
    out = (q * into) @ states + ((q @ k.mT) * weights) @ updates
    return out.flatten(2, 3)[:, :, :s].transpose(1, 2).to(dtype), state


# The loop over chunks: one operation, or compilers would unroll it.
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
    """The gradients of what ``_go_through`` returned, with what later chunks add to them."""
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
