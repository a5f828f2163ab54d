"""Dense decoder of Llama 3 and Qwen3, written for one device.

Shapes: b batch, s sequence, d model dim, h heads, k head dim. Under tensor parallelism a rank
has fewer heads, so views infer h with -1. Under context parallelism it has a sequence shard, but
``inner`` attends to the whole sequence. Components: RMSNorm, rotary embeddings, grouped-query
attention, SwiGLU.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn as nn
import torch.nn.functional as F

from kernels.embedding import Embedding
from kernels.rms_norm import RMSNorm

InitFn = Callable[..., object]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's scaling of low rotary frequencies to longer contexts."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192


@dataclass(frozen=True, kw_only=True)
class TransformerArgs:
    """Shape of a Llama or Qwen3 model; ``hidden_dim`` is the feed-forward's."""

    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {}
    """Arguments that a family does not read, and why."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    vocab_size: int
    max_seq_len: int = 8192
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    qk_norm: bool = False
    tie_embeddings: bool = False


def rope_cache(args: TransformerArgs) -> torch.Tensor:
    """Return cos and sin of every position and frequency: (2, max_seq_len, k/2), float64.

    Rotary embedding: arXiv 2104.09864. Scaling: section 3.4.1 of arXiv 2407.21783.
    """
    exponents = torch.arange(0, args.head_dim, 2, dtype=torch.float64) / args.head_dim
    frequencies = args.rope_theta**-exponents
    if args.rope_scaling is not None:
        frequencies = _scale_frequencies(frequencies, args.rope_scaling)
    angles = torch.outer(torch.arange(args.max_seq_len, dtype=torch.float64), frequencies)
    return torch.stack([angles.cos(), angles.sin()])


def _scale_frequencies(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Keep high frequencies, divide low ones by ``factor``, interpolate in between."""
    rotations = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((rotations - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)


def apply_rope(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotate the two halves of x (b, s, h, k) by rope (2, b or 1, s, k/2), in rope's precision."""
    return _Rotation.apply(x, rope)


class _Rotation(torch.autograd.Function):
    """Rotation whose backward needs half of autograd's memory passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rope)
        cos, sin = rope[:, :, :, None]
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (rope,) = ctx.saved_tensors
        cos, sin = rope[:, :, :, None]
        return _rotate(gradients[0], cos, -sin), None


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = (half.to(cos.dtype) for half in x.chunk(2, dim=-1))
    rotated = [(first * cos).sub_(second * sin), (second * cos).add_(first * sin)]
    return torch.cat([half.to(x.dtype) for half in rotated], dim=-1)


class Rope(nn.Module):
    """Cache of cos and sin of every position."""

    cache: torch.Tensor

    def __init__(self, args: TransformerArgs) -> None:
        super().__init__()
        self.args = args
        # Angles of late positions need float32 at least, whatever the weights' dtype.
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        cache = torch.empty(2, args.max_seq_len, args.head_dim // 2, dtype=dtype)
        self.register_buffer("cache", cache, persistent=False)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """Look up positions (b, s) int64: cos and sin (2, b, s, k/2)."""
        return self.cache[:, positions]

    def init_weights(self) -> None:
        self.cache.copy_(rope_cache(self.args))


class InnerAttention(nn.Module):
    """Scaled dot-product attention; context parallel, KV caches and kernels wrap or replace it."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, document_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """Causal attention within documents: q (b, s_q, h, k), k and v (b, s, h_kv, k).

        The queries are the last s_q of the s positions. ``document_ids`` (b, s) names the document
        of each position; None means one document.
        """
        n_queries, n_keys = q.shape[1], k.shape[1]
        mask = None
        if document_ids is not None:
            mask = document_ids[:, None, -n_queries:, None] == document_ids[:, None, None, :]
        elif 1 < n_queries < n_keys:
            mask = torch.ones(n_queries, n_keys, dtype=torch.bool, device=q.device)
        if mask is not None:
            mask = mask.tril(n_keys - n_queries)
        if q.is_cuda:
            k, v = unshared_heads(q, k, v)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None and n_queries > 1, enable_gqa=True
        )
        return out.transpose(1, 2)


def unshared_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``k`` and ``v`` (b, s, h_kv, k) as PyTorch's fused attention on GPUs reads them.

    In half precision as they are. In float32 with a head for each of ``q`` (b, s_q, h, k): the only
    fused kernel, memory-efficient attention, knows no shared heads; without it s_q x s scores would
    be stored.
    """
    n_shared = q.shape[2] // k.shape[2]
    if n_shared == 1 or q.dtype in (torch.bfloat16, torch.float16):
        return k, v
    return k.repeat_interleave(n_shared, dim=2), v.repeat_interleave(n_shared, dim=2)


class Attention(nn.Module):
    """Grouped-query attention with rotary embeddings and optional q and k norms."""

    def __init__(self, args: TransformerArgs) -> None:
        super().__init__()
        self.head_dim = args.head_dim
        self.wq = nn.Linear(args.dim, args.n_heads * args.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wo = nn.Linear(args.n_heads * args.head_dim, args.dim, bias=False)
        self.q_norm = RMSNorm(args.head_dim, args.norm_eps) if args.qk_norm else None
        self.k_norm = RMSNorm(args.head_dim, args.norm_eps) if args.qk_norm else None
        self.inner = InnerAttention()

    def forward(
        self, x: torch.Tensor, rope: torch.Tensor, document_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """Map x (b, s, d) to (b, s, d); ``rope`` (2, b or 1, s, k/2)."""
        b, s, _ = x.shape
        q = self.wq(x).view(b, s, -1, self.head_dim)  # (b, s, h, k); h is this rank's heads
        k = self.wk(x).view(b, s, -1, self.head_dim)
        v = self.wv(x).view(b, s, -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out = self.inner(apply_rope(q, rope), apply_rope(k, rope), v, document_ids)
        return self.wo(out.reshape(b, s, -1))

    def init_weights(self, trunc_normal_: InitFn, residual_std: float) -> None:
        for linear in (self.wq, self.wk, self.wv):
            trunc_normal_(linear.weight, std=0.02)
        trunc_normal_(self.wo.weight, std=residual_std)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.reset_parameters()


class FeedForward(nn.Module):
    """SwiGLU: x (..., d) to (..., d)."""

    def __init__(self, args: TransformerArgs) -> None:
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.hidden_dim, bias=False)
        self.w2 = nn.Linear(args.hidden_dim, args.dim, bias=False)
        self.w3 = nn.Linear(args.dim, args.hidden_dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))

    def init_weights(self, trunc_normal_: InitFn, residual_std: float) -> None:
        for linear in (self.w1, self.w3):
            trunc_normal_(linear.weight, std=0.02)
        trunc_normal_(self.w2.weight, std=residual_std)


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream (b, s, d)."""

    def __init__(self, args: TransformerArgs) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(args.dim, args.norm_eps)
        self.attention: nn.Module = Attention(args)
        self.ffn_norm = RMSNorm(args.dim, args.norm_eps)
        self.feed_forward: nn.Module = FeedForward(args)

    def forward(
        self, x: torch.Tensor, rope: torch.Tensor, document_ids: torch.Tensor | None
    ) -> torch.Tensor:
        x, normed = self.attend(x, rope, document_ids)
        return x + self.feed_forward(normed)

    def attend(
        self, x: torch.Tensor, rope: torch.Tensor, document_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run attention; return residual stream and feed-forward input, both (b, s, d)."""
        x = x + self.attention(self.attention_norm(x), rope, document_ids)
        return x, self.ffn_norm(x)

    def init_weights(self, trunc_normal_: InitFn, residual_std: float) -> None:
        self.attention_norm.reset_parameters()
        self.ffn_norm.reset_parameters()
        cast(Attention, self.attention).init_weights(trunc_normal_, residual_std)
        cast(FeedForward, self.feed_forward).init_weights(trunc_normal_, residual_std)


class Transformer(nn.Module):
    """Decoder from tokens to logits.

    ``layers`` is a ModuleDict, so FQNs stay when a pipeline stage deletes some layers. Only the
    first stage has ``tok_embeddings``; only the last has ``norm`` and ``output``.
    """

    def __init__(self, args: TransformerArgs) -> None:
        super().__init__()
        self.args = args
        self.rope = Rope(args)
        self.tok_embeddings: nn.Embedding | None = Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleDict({str(i): self.build_block(i) for i in range(args.n_layers)})
        self.norm: RMSNorm | None = RMSNorm(args.dim, args.norm_eps)
        self.output: nn.Linear | None = nn.Linear(args.dim, args.vocab_size, bias=False)
        if args.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def build_block(self, index: int) -> nn.Module:
        """Build layer ``index``. Families override this."""
        return TransformerBlock(self.args)

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Map tokens (b, s) at positions (b or 1, s) to (b, s, d). Families override this.

        Only the first pipeline stage calls it.
        """
        assert self.tok_embeddings is not None, "a later stage"
        return self.tok_embeddings(tokens)

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Map tokens x (b, s) int64 to logits (b, s, vocab_size).

        Between pipeline stages, either is a hidden state (b, s, d). Without ``positions`` (b, s)
        the sequence starts at 0. ``document_ids`` (b, whole sequence); None: one document.
        """
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)[None]
        rope = self.rope(positions)
        h = x if self.tok_embeddings is None else self.embed(x, positions)
        for layer in self.layers.values():
            h = layer(h, rope, document_ids)
        return h if self.norm is None or self.output is None else self.output(self.norm(h))

    @torch.no_grad()
    def init_weights(self, trunc_normal_: InitFn = nn.init.trunc_normal_) -> None:
        """Fill every parameter and buffer, undefined after ``to_empty``. Mutates the model.

        ``trunc_normal_(param, std=...)`` fills in place, truncating at 3 std or farther.
        """
        self.rope.init_weights()
        is_tied = self.args.tie_embeddings
        if self.tok_embeddings is not None:
            # A tied model would predict its input with a std of 1, because of the residual stream.
            # 0.02: initializer_range in the published configs of tied models.
            trunc_normal_(self.tok_embeddings.weight, std=0.02 if is_tied else 1.0)
        for layer in self.layers.values():
            # Each block adds to the residual twice; this keeps its variance independent of depth.
            cast(TransformerBlock, layer).init_weights(
                trunc_normal_, residual_std=0.02 / (2 * self.args.n_layers) ** 0.5
            )
        if self.norm is not None:
            self.norm.reset_parameters()
        if self.output is not None and not is_tied:
            trunc_normal_(self.output.weight, std=self.args.dim**-0.5)
