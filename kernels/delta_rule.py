"""Chunkwise gated delta rule (section 3.3 of arXiv 2412.06464).

The triangular systems within chunks are solved for all chunks at once. Only the state connects
chunks; a sequential scan computes it.
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
    g: torch.Tensor,
    beta: torch.Tensor,
    document_ids: torch.Tensor | None,
    state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output (b, s, h, v) and the final state (b, h, k, v).

    q, k (b, s, h, k); v (b, s, h, v); log decay g and beta (b, s, h). Each head's state S (k, v)
    starts at zero in each document: S = e^g S; S += k (beta (v - S'k))'; out = S'q. To continue
    a sequence, pass its ``state``, and ``document_ids`` (b, s + 1 or more) that start at the
    position before. Computes in float32 or more, and returns the state in that dtype.
    """
    b, s, h, _ = q.shape
    dtype = q.dtype
    precise = torch.promote_types(dtype, torch.float32)
    q, k, v, g, beta = (t.to(precise) for t in (q, k, v, g, beta))
    if document_ids is None:
        document_ids = torch.zeros(b, s, dtype=torch.int64, device=q.device)
    q, k = (t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for t in (q, k))
    q = q * q.shape[-1] ** -0.5
    if state is None:
        state = q.new_zeros(b, h, k.shape[-1], v.shape[-1])
    chunk = min(CHUNK, s)
    padding = -s % chunk
    q, k, v, g, beta = (t.transpose(1, 2) for t in (q, k, v, g, beta))
    if padding:
        # Padding with g = beta = 0 leaves the state unchanged.
        q, k, v = (F.pad(t, (0, 0, 0, padding)) for t in (q, k, v))
        g, beta = (F.pad(t, (0, padding)) for t in (g, beta))
    # (b, h, chunks, c, ...)
    q, k, v, g, beta = (t.unflatten(2, (-1, chunk)) for t in (q, k, v, g, beta))
    document_ids = document_ids[:, -(s + 1) :]
    ids = torch.cat([document_ids[:, -s:], document_ids[:, -1:].expand(-1, padding)], dim=1)
    ids = ids.unflatten(1, (-1, chunk))
    previous = torch.cat([document_ids[:, :1], ids[:, :-1, -1]], dim=1)
    # Per chunk of c positions: gamma (c, 1) is the decay since the chunk's start, decay_mask (c, c)
    # the paper's Gamma, the decay between positions. Both are 0 across documents. w (c, k) and
    # u (c, v) solve (I + strictLower(beta K K' * Gamma)) [W, U] = [beta gamma K, beta V]. Then
    # S_next = gamma_end S + K_end (U - W S), out = gamma Q S + (Q K' * Gamma) (U - W S).
    # Not cumsum, because CUDA's is not deterministic.
    log_gamma = g[..., None, :].expand(*g.shape, chunk).tril().sum(-1)
    is_same = (ids[..., :, None] == ids[..., None, :]).tril()[:, None]
    log_ratio = log_gamma[..., :, None] - log_gamma[..., None, :]
    decay_mask = log_ratio.masked_fill(~is_same, -math.inf).exp()
    gamma = (log_gamma.exp() * (ids == previous[..., None])[:, None])[..., None]
    kb = k * beta[..., None]
    system, rhs = (kb @ k.mT) * decay_mask, torch.cat([kb * gamma, v * beta[..., None]], dim=-1)
    solution = torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True)
    w, u = solution.split([k.shape[-1], v.shape[-1]], dim=-1)
    k_end, gamma_end = (decay_mask[..., -1, :, None] * k).mT, gamma[..., -1:, :]
    inputs = (t.flatten(0, 1) for t in (w, u, k_end, gamma_end, state))
    states, updates, state = (t.unflatten(0, (b, h)) for t in _chunk_scan(*inputs))
    out = (q * gamma) @ states + ((q @ k.mT) * decay_mask) @ updates
    return out.flatten(2, 3)[:, :, :s].transpose(1, 2).to(dtype), state


# A custom op, because torch.compile would unroll the loop over chunks.
@torch.library.custom_op("shardloom::chunk_scan", mutates_args=())
def _chunk_scan(
    w: torch.Tensor,
    u: torch.Tensor,
    k_end: torch.Tensor,
    gamma: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scan n chunks: S_next = gamma S + K_end (U - W S).

    w (b, n, c, k), u (b, n, c, v), k_end (b, n, k, c), gamma (b, n, 1, 1), state (b, k, v).
    Returns the chunks' initial states (b, n, k, v), their updates U - W S (b, n, c, v), and the
    final state (b, k, v).
    """
    states, updates, final = _empty_outputs(u, state)
    all_states = [*states.unbind(1), final]
    all_states[0].copy_(state)
    for i, update in enumerate(updates.unbind(1)):
        torch.baddbmm(u[:, i], w[:, i], all_states[i], alpha=-1, out=update)
        torch.mul(all_states[i], gamma[:, i], out=all_states[i + 1]).baddbmm_(k_end[:, i], update)
    return states, updates, final


@_chunk_scan.register_fake
def _(
    w: torch.Tensor,
    u: torch.Tensor,
    k_end: torch.Tensor,
    gamma: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _empty_outputs(u, state)


def _empty_outputs(
    u: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    states = u.new_empty(*u.shape[:2], *state.shape[1:])
    return states, u.new_empty(u.shape), state.new_empty(state.shape)


@torch.library.custom_op("shardloom::chunk_scan_backward", mutates_args=())
def _chunk_scan_backward(
    grad_states: torch.Tensor,
    grad_updates: torch.Tensor,
    grad_final: torch.Tensor,
    w: torch.Tensor,
    k_end: torch.Tensor,
    gamma: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reverse scan: add later chunks' gradients to those of ``_chunk_scan``'s outputs."""
    grad_states, grad_updates, grad_final = (
        t.clone(memory_format=torch.contiguous_format)
        for t in (grad_states, grad_updates, grad_final)
    )
    grads = [*grad_states.unbind(1), grad_final]
    for i, grad_update in reversed(list(enumerate(grad_updates.unbind(1)))):
        grad_update.baddbmm_(k_end[:, i].mT, grads[i + 1])
        grads[i].addcmul_(grads[i + 1], gamma[:, i])
        grads[i].baddbmm_(w[:, i].mT, grad_update, alpha=-1)
    return grad_states, grad_updates, grad_final


@_chunk_scan_backward.register_fake
def _(
    grad_states: torch.Tensor,
    grad_updates: torch.Tensor,
    grad_final: torch.Tensor,
    w: torch.Tensor,
    k_end: torch.Tensor,
    gamma: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _empty_outputs(grad_updates, grad_final)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    w, _, k_end, gamma, _ = inputs
    ctx.save_for_backward(w, k_end, gamma, *output[:2])


@once_differentiable
def _backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
    w, k_end, gamma, states, updates = ctx.saved_tensors
    grad_states, grad_u, grad_final = _chunk_scan_backward(*gradients, w, k_end, gamma)
    grad_next = torch.cat([grad_states[:, 1:], grad_final[:, None]], dim=1)
    grad_gamma = (grad_next * states).sum((-2, -1), keepdim=True)
    return -grad_u @ states.mT, grad_u, grad_next @ updates.mT, grad_gamma, grad_states[:, 0]


_chunk_scan.register_autograd(_backward, setup_context=_setup_context)
