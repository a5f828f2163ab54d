"""KV caches, and state caches of Gated DeltaNet, for incremental inference."""

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
    """Context in which each model call continues the sequence, up to ``max_seq_len`` positions.

    The caller passes the positions, and ``document_ids`` of the sequence so far. Inference only.
    Mutates the modules: wraps ``inner`` and restores it on exit, so each context has new caches.
    """
    originals = [(module, cast(nn.Module, module.inner)) for module in (*attentions, *delta_nets)]
    for attention in attentions:
        attention.inner = CachedAttention(cast(nn.Module, attention.inner), max_seq_len)
    for delta_net in delta_nets:
        delta_net.inner = CachedDeltaNet(cast(InnerDeltaNet, delta_net.inner))
    try:
        yield
    finally:
        for module, inner in originals:
            module.inner = inner


class CachedAttention(nn.Module):
    """KV cache around an attention's ``inner``."""

    def __init__(self, inner: nn.Module, max_seq_len: int) -> None:
        super().__init__()
        self.inner, self.max_seq_len = inner, max_seq_len
        self.n_cached = 0
        # Allocated at full size, because a growing cache would be copied for every token.
        self.caches: list[torch.Tensor] = []

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, document_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """Append k and v (b, s, h_kv, k), attend from q (b, s, h, k); document_ids (b, end).

        Raises ``ValueError`` if the cache is full.
        """
        assert not torch.is_grad_enabled(), "KV cache: inference only, needs torch.no_grad()"
        begin, end = self.n_cached, self.n_cached + k.shape[1]
        if end > self.max_seq_len:
            raise ValueError(
                f"KV cache is full: max_seq_len = {self.max_seq_len}, positions = {end}"
            )
        if not self.caches:
            self.caches = [t.new_empty(len(t), self.max_seq_len, *t.shape[2:]) for t in (k, v)]
        for cache, new in zip(self.caches, (k, v), strict=True):
            assert len(cache) == len(new), "KV cache: the batch size changed"
            cache[:, begin:end] = new
        self.n_cached = end
        k, v = (cache[:, :end] for cache in self.caches)
        return self.inner(q, k, v, document_ids)


class CachedDeltaNet(nn.Module):
    """Cache of the recurrent state and of the last inputs of the convolution."""

    def __init__(self, inner: InnerDeltaNet) -> None:
        super().__init__()
        self.inner = inner
        self.conv_inputs: torch.Tensor | None = None
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
        """Continue with the next positions; as ``InnerDeltaNet``, but document_ids (b, end)."""
        assert not torch.is_grad_enabled(), "KV cache: inference only, needs torch.no_grad()"
        if self.conv_inputs is not None:
            assert len(self.conv_inputs) == len(qkv), "KV cache: the batch size changed"
            qkv = torch.cat([self.conv_inputs, qkv], dim=1)
        self.conv_inputs = qkv[:, qkv.shape[1] - min(qkv.shape[1], conv.shape[-1] - 1) :].clone()
        out, self.state = self.inner.forward_with_state(
            qkv, gates, conv, a_log, dt_bias, document_ids, self.state
        )
        return out
