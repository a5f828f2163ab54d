"""The gated delta rule as a recurrence, to compare with."""

import torch


def token_by_token(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    ids: torch.Tensor | None, state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Recurrence over tokens: shapes as in ``delta_rule``."""
    q, k = (t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for t in (q, k))
    q, outs = q * q.shape[-1] ** -0.5, []
    if ids is None:
        ids = torch.zeros(q.shape[:2], dtype=torch.int64)
    if state is None:
        state = q.new_zeros(*q.shape[::2], k.shape[-1], v.shape[-1])
    for t in range(q.shape[1]):
        is_same = (ids[:, t] == ids[:, max(t - 1, 0)])[:, None, None, None]
        state = state * g[:, t].exp()[..., None, None] * is_same
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        # A matmul, so that its FLOPs are counted.
        state = state + k[:, t, :, :, None] @ (beta[:, t, :, None] * error)[..., None, :]
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outs, dim=1), state
