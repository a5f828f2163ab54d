"""What layers keep of a sequence, so that a model can be given it piece by piece."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
import torch.nn as nn

from models.gated_delta_net import InnerDeltaNet


@contextmanager
def cached(
    attentions: list[nn.Module], delta_nets: list[nn.Module], *, max_seq_len: int
) -> Iterator[None]:
    """Inside, each call of the model goes on where the last ended, to ``max_seq_len`` positions.

    The caller passes the positions, and ``document_ids`` of the whole sequence so far. No
    gradients. Wraps the ``inner`` of each module, and unwraps it at the end, so that every sequence
    has a cache of its own.
    """
    before = [(module, cast(nn.Module, module.inner)) for module in (*attentions, *delta_nets)]
    for attention in attentions:
        attention.inner = CachedAttention(cast(nn.Module, attention.inner), max_seq_len)
    for delta_net in delta_nets:
        delta_net.inner = CachedDeltaNet(cast(InnerDeltaNet, delta_net.inner))
    try:
        yield
    finally:
        for module, inner in before:
            module.inner = inner


class CachedAttention(nn.Module):
    """Keeps the keys and values."""

    def __init__(self, inner: nn.Module, max_seq_len: int) -> None:
        super().__init__()
        self.inner, self.max_seq_len = inner, max_seq_len
        self.n_seen = 0
        # Of full size from the first call on: one that grows is copied for every token.
        self.caches: list[torch.Tensor] = []

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, document_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """The next positions: q (b, s, h, k), k and v (b, s, h_kv, k); document_ids (b, so far)."""
        assert not torch.is_grad_enabled(), "a cache has no gradients"
        begin, end = self.n_seen, self.n_seen + k.shape[1]
        if end > self.max_seq_len:
            raise ValueError(f"a cache of {self.max_seq_len} positions has no room for {end}")
        if not self.caches:
            self.caches = [t.new_empty(len(t), self.max_seq_len, *t.shape[2:]) for t in (k, v)]
        for cache, new in zip(self.caches, (k, v), strict=True):
            assert len(cache) == len(new), "other sequences than before"
            cache[:, begin:end] = new
        self.n_seen = end
        k, v = (cache[:, :end] for cache in self.caches)
        return self.inner(q, k, v, document_ids)


class CachedDeltaNet(nn.Module):
    """Keeps the state, and those last positions that the convolution still sees."""

    def __init__(self, inner: InnerDeltaNet) -> None:
        super().__init__()
        self.inner = inner
        self.seen: torch.Tensor | None = None
        self.state: torch.Tensor | None = None

    def forward(
        self,
        qkv: torch.Tensor,
        gates: torch.Tensor,
        conv: torch.Tensor,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        document_ids: torch.Tensor | None,
    ) -> torch.Tensor:
        """The next positions, as ``InnerDeltaNet`` takes them; document_ids (b, so far)."""
        assert not torch.is_grad_enabled(), "a cache has no gradients"
        if self.seen is not None:
            assert len(self.seen) == len(qkv), "other sequences than before"
            qkv = torch.cat([self.seen, qkv], dim=1)
        self.seen = qkv[:, qkv.shape[1] - min(qkv.shape[1], conv.shape[-1] - 1) :].clone()
        out, self.state = self.inner.go_on(
            qkv, gates, conv, a_log, dt_bias, document_ids, self.state
        )
        return out
