"""Qwen3-Next: three Gated DeltaNet layers per gated attention layer; MoE in all.

Sources: the published config and ``transformers``; arXiv 2412.06464, 2505.06708.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn as nn

from kernels.rms_norm import RMSNorm, rms_norm
from models.gated_delta_net import GatedDeltaNet
from models.moe import LocalLinear, MoE
from models.qwen3_moe import Qwen3MoeArgs
from models.transformer import (
    Attention,
    FeedForward,
    InitFn,
    Rope,
    Transformer,
    TransformerBlock,
    apply_rope,
)


@dataclass(frozen=True, kw_only=True)
class Qwen3NextArgs(Qwen3MoeArgs):
    """Shape of a Qwen3-Next. ``n_heads`` to ``head_dim`` are those of its attention layers."""

    WITHOUT_EFFECT: ClassVar = {"qk_norm": "attention always normalizes queries and keys"}

    rotary_dim: int
    """Rotated dims of each head."""
    shared_hidden_dim: int
    """Hidden dim of the shared expert."""
    n_key_heads: int
    """This and the next four: Gated DeltaNet."""
    n_value_heads: int
    key_dim: int
    value_dim: int
    conv_size: int = 4
    attention_every: int = 4
    """Every n-th layer has attention, the others Gated DeltaNet."""

    def has_attention(self, layer: int) -> bool:
        """True if ``layer``, 0-based, has attention; False if it has Gated DeltaNet."""
        return (layer + 1) % self.attention_every == 0


class Qwen3Next(Transformer):
    """Hybrid decoder: Gated DeltaNet in most layers, gated attention in every n-th, MoE in all."""

    args: Qwen3NextArgs

    def __init__(self, args: Qwen3NextArgs) -> None:
        super().__init__(args)
        self.rope = Rope(replace(args, head_dim=args.rotary_dim))
        self.norm = ZeroCenteredNorm(args.dim, args.norm_eps)

    def build_block(self, index: int) -> nn.Module:
        return Qwen3NextBlock(self.args, has_attention=self.args.has_attention(index))


class Qwen3NextBlock(TransformerBlock):
    """Transformer block with attention or Gated DeltaNet, and a MoE with a shared expert."""

    def __init__(self, args: Qwen3NextArgs, *, has_attention: bool) -> None:
        super().__init__(args)
        self.attention_norm = ZeroCenteredNorm(args.dim, args.norm_eps)
        self.attention = GatedAttention(args) if has_attention else build_delta_net(args)
        self.ffn_norm = ZeroCenteredNorm(args.dim, args.norm_eps)
        self.feed_forward = SharedMoE(args)


class ZeroCenteredNorm(RMSNorm):
    """RMSNorm with scale 1 + weight, so that weight decay pulls the scale to 1."""

    decays_weight = True

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        precise = torch.promote_types(x.dtype, torch.float32)
        return rms_norm(x, 1.0 + self.weight.to(precise), self.eps)


class GatedAttention(Attention):
    """Attention with partial rotary embeddings and a sigmoid output gate."""

    q_norm: ZeroCenteredNorm
    k_norm: ZeroCenteredNorm

    def __init__(self, args: Qwen3NextArgs) -> None:
        super().__init__(args)
        self.rotary_dim = args.rotary_dim
        self.wq = nn.Linear(args.dim, 2 * args.n_heads * args.head_dim, bias=False)
        self.q_norm = ZeroCenteredNorm(args.head_dim, args.norm_eps)
        self.k_norm = ZeroCenteredNorm(args.head_dim, args.norm_eps)

    def forward(
        self, x: torch.Tensor, rope: torch.Tensor, document_ids: torch.Tensor | None
    ) -> torch.Tensor:
        b, s, _ = x.shape
        q, gate = self.wq(x).view(b, s, -1, 2 * self.head_dim).chunk(2, dim=-1)
        k = self.k_norm(self.wk(x).view(b, s, -1, self.head_dim))
        v = self.wv(x).view(b, s, -1, self.head_dim)
        q, k = self._rotate(self.q_norm(q), rope), self._rotate(k, rope)
        out = self.inner(q, k, v, document_ids) * gate.sigmoid()
        return self.wo(out.reshape(b, s, -1))

    def _rotate(self, x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        rotary, rest = x.split([self.rotary_dim, self.head_dim - self.rotary_dim], dim=-1)
        return torch.cat([apply_rope(rotary, rope), rest], dim=-1)


def build_delta_net(args: Qwen3NextArgs) -> GatedDeltaNet:
    """Build the Gated DeltaNet of one layer."""
    return GatedDeltaNet(
        dim=args.dim,
        n_key_heads=args.n_key_heads,
        n_value_heads=args.n_value_heads,
        key_dim=args.key_dim,
        value_dim=args.value_dim,
        conv_size=args.conv_size,
        norm_eps=args.norm_eps,
    )


class SharedExpert(FeedForward):
    """SwiGLU feed-forward, replicated under tensor parallel: each rank computes its own tokens."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        nn.Module.__init__(self)
        self.w1 = LocalLinear(dim, hidden_dim)
        self.w2 = LocalLinear(hidden_dim, dim)
        self.w3 = LocalLinear(dim, hidden_dim)


class SharedMoE(MoE):
    """MoE with a gated shared expert."""

    def __init__(self, args: Qwen3NextArgs) -> None:
        super().__init__(
            dim=args.dim,
            hidden_dim=args.hidden_dim,
            n_experts=args.n_experts,
            top_k=args.top_k,
            balance_weight=args.balance_weight,
        )
        self.shared = SharedExpert(args.dim, args.shared_hidden_dim)
        self.shared_gate = LocalLinear(args.dim, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.apply_shared_expert(x)

    def apply_shared_expert(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared_gate(x).sigmoid() * self.shared(x)

    def init_weights(self, trunc_normal_: InitFn, residual_std: float) -> None:
        super().init_weights(trunc_normal_, residual_std)
        self.shared.init_weights(trunc_normal_, residual_std)
        trunc_normal_(self.shared_gate.weight, std=0.02)


FLAVORS = {
    "debugmodel": Qwen3NextArgs(
        dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=96, vocab_size=320,
        max_seq_len=2048, rope_theta=1e7, norm_eps=1e-6, n_experts=8, top_k=2, rotary_dim=8,
        shared_hidden_dim=96, n_key_heads=2, n_value_heads=4, key_dim=16, value_dim=24,
    ),
    "80B-A3B": Qwen3NextArgs(
        dim=2048, n_layers=48, n_heads=16, n_kv_heads=2, head_dim=256, hidden_dim=512,
        vocab_size=151936, max_seq_len=262144, rope_theta=1e7, norm_eps=1e-6, n_experts=512,
        top_k=10, rotary_dim=64, shared_hidden_dim=512, n_key_heads=16, n_value_heads=32,
        key_dim=128, value_dim=128,
    ),
}  # fmt: skip
