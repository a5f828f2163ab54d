"""Gated DeltaNet (arXiv 2412.06464): linear attention with a gated delta rule on its state.

b batch, s sequence, n key heads, r value heads per key head, k and v their head dims. Every
weight is grouped by key head, so that tensor parallel can shard it over heads.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from kernels.delta_rule import delta_rule
from models.dtensor import to_local_with_partial_grad
from models.transformer import InitFn


class GatedDeltaNet(nn.Module):
    """Token mixer: projections, short convolution, gated delta rule, gated norm."""

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
        """Features of q, k and v per key head."""
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
        """Map x (b, s, d) to (b, s, d); ``rope`` is unused: the recurrence encodes order."""
        b, s, _ = x.shape
        qkvz = self.wqkvz(x).view(b, s, -1, self.group + self.ratio * self.value_dim)
        qkv, z = qkvz.split([self.group, self.ratio * self.value_dim], dim=-1)
        beta, a = self.wba(x).view(b, s, -1, 2 * self.ratio).chunk(2, dim=-1)
        gates = torch.stack([beta, a], dim=-1)  # (b, s, n, r, 2)
        head_weights = (
            to_local_with_partial_grad(weight) for weight in (self.conv, self.a_log, self.dt_bias)
        )
        out = self.inner(qkv, gates, *head_weights, document_ids)
        out = self.norm(out, z.reshape(b, s, -1, self.value_dim))
        return self.wo(out.reshape(b, s, -1))

    def init_weights(self, trunc_normal_: InitFn, residual_std: float) -> None:
        for weight in (self.wqkvz.weight, self.wba.weight):
            trunc_normal_(weight, std=0.02)
        trunc_normal_(self.conv, std=self.conv.shape[-1] ** -0.5)
        # exp(a_log) is uniform in [1, 16]: the normal's CDF maps each sample.
        trunc_normal_(self.a_log, std=1.0)
        self.a_log.copy_((1 + 7.5 * (1 + torch.erf(self.a_log / math.sqrt(2)))).log())
        nn.init.ones_(self.dt_bias)
        nn.init.ones_(self.norm.weight)
        trunc_normal_(self.wo.weight, std=residual_std)


class InnerDeltaNet(nn.Module):
    """Convolution and delta rule: the whole sequence of any subset of the heads."""

    def __init__(self, key_dim: int, value_dim: int) -> None:
        super().__init__()
        self.key_dim, self.value_dim, self.rule = key_dim, value_dim, delta_rule

    def forward(
        self,
        qkv: torch.Tensor,
        gates: torch.Tensor,
        conv: torch.Tensor,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        document_ids: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return (b, s, n * r, v).

        qkv (b, s, n, group), gates (b, s, n, r, 2), conv (n, group, size), a_log and dt_bias
        (n * r,), document_ids (b, s).
        """
        return self.forward_with_state(qkv, gates, conv, a_log, dt_bias, document_ids, None)[0]

    def forward_with_state(
        self,
        qkv: torch.Tensor,
        gates: torch.Tensor,
        conv: torch.Tensor,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        document_ids: torch.Tensor | None,
        state: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Continue from ``state`` (b, n * r, k, v); also return the final state.

        ``gates`` cover only the new positions. ``qkv`` may begin with earlier ones, which the
        convolution needs. ``document_ids`` (b, s or more) ends at the last position.
        """
        precise = torch.promote_types(qkv.dtype, torch.float32)
        mixed = F.silu(causal_conv(qkv, conv, document_ids)[:, -gates.shape[1] :])
        q, k, v = mixed.split([self.key_dim, self.key_dim, mixed.shape[-1] - 2 * self.key_dim], -1)
        ratio = gates.shape[3]
        q, k = (t.repeat_interleave(ratio, dim=2) for t in (q, k))
        v = v.reshape(*q.shape[:3], self.value_dim)
        beta, a = gates.flatten(2, 3).unbind(-1)
        g = -a_log.to(precise).exp() * F.softplus(a.to(precise) + dt_bias.to(precise))
        return self.rule(q, k, v, g, beta.sigmoid(), document_ids, state)


class GatedNorm(nn.Module):
    """RMSNorm over each head, times silu(gate)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(dim)), eps

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        precise = torch.promote_types(x.dtype, torch.float32)
        normed = F.rms_norm(x.to(precise), x.shape[-1:], eps=self.eps).type_as(x)
        return (
            to_local_with_partial_grad(self.weight) * normed * F.silu(gate.to(precise))
        ).type_as(x)


def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, document_ids: torch.Tensor | None
) -> torch.Tensor:
    """Depthwise causal convolution within documents: x (b, s, n, c) to (b, s, n, c).

    weight (n, c, size); its last column applies to the current position.
    """
    size, s = weight.shape[-1], x.shape[1]
    if document_ids is not None:
        document_ids = document_ids[:, -s:]
    out = x * weight[..., -1]
    for lag in range(1, min(size, s)):
        earlier = x[:, : s - lag]
        if document_ids is not None:
            is_same = document_ids[:, lag:] == document_ids[:, : s - lag]
            earlier = earlier * is_same[:, :, None, None]
        out = out + F.pad(earlier * weight[..., -1 - lag], (0, 0, 0, 0, lag, 0))
    return out
