"""Context parallel: shards every sequence over ranks; attention still sees all of it.

``ulysses`` (arXiv 2309.14509): an all-to-all before attention trades sequence for heads, one after
it trades back. ``allgather`` (section 3.3.2 of arXiv 2407.21783): keys and values are gathered.
"""

import math
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from config.job_config import ContextParallelMethod, Parallelism
from runtime.compat import all_to_all
from runtime.log import logger

Exchange = Callable[[torch.Tensor], torch.Tensor]
"""All-to-all of t (n, ...): t[i] is sent to rank i, and replaced by what rank i sent."""


def apply_context_parallel(
    attentions: list[nn.Module],
    delta_nets: list[nn.Module],
    cp_mesh: DeviceMesh,
    *,
    method: ContextParallelMethod,
) -> None:
    """Wrap forward of each ``inner``, so that it sees the whole sequence. Mutates the modules.

    FQNs stay: ``inner`` may have parameters and buffers.

    Gated delta nets have a state instead of keys: both methods shard them by heads. The model's
    inputs must be sharded by ``sequence_shard``; ``document_ids`` are those of the whole sequence.
    """
    kind = {"ulysses": Ulysses, "allgather": AllGather}[method]
    for attention in attentions:
        inner = cast(nn.Module, attention.inner)
        inner.forward = kind(_Whole(inner), cp_mesh).forward
    for delta_net in delta_nets:
        inner = cast(nn.Module, delta_net.inner)
        wrapped = UlyssesDeltaNet(_Whole(inner), cp_mesh, method)
        inner.forward = wrapped.forward
    logger.info("context parallel: %s in %d layers, %d gated delta nets, on %d ranks",
                method, len(attentions), len(delta_nets), cp_mesh.size())  # fmt: skip


class SequenceSharder:
    """Copies sequences to the device and takes this rank's shard of each; gathers all shards."""

    def __init__(
        self,
        cp_mesh: DeviceMesh | None,
        parallelism: Parallelism,
        device: torch.device,
        *,
        needs_positions: bool = False,
    ) -> None:
        self._mesh = None if cp_mesh is None or cp_mesh.size() == 1 else cp_mesh
        self._method, self._device = parallelism.context_parallel_method, device
        self._needs_positions = needs_positions or self._mesh is not None

    def inputs(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Copy to the device and shard: tokens, positions (b, s/cp); document_ids stay (b, s)."""
        options = {}
        if positions is None and self._needs_positions:
            positions = torch.arange(tokens.shape[1], device=self._device).expand(tokens.shape)
        if positions is not None:
            options["positions"] = self.shard(positions)
        if document_ids is not None:
            options["document_ids"] = document_ids.to(self._device, non_blocking=True)
        return self.shard(tokens), options

    def shard(self, sequences: torch.Tensor) -> torch.Tensor:
        """Copy (b, s) to the device and take this rank's (b, s/cp)."""
        # Copy, then slice: a slice made on the host is not pinned, so copying it would block.
        sequences = sequences.to(self._device, non_blocking=True)
        if self._mesh is not None:
            seq_len = sequences.shape[1]
            positions = sequence_shard(seq_len, self._mesh, self._device, method=self._method)
            sequences = sequences[:, positions]
        return sequences

    def unshard(self, logits: torch.Tensor) -> torch.Tensor:
        """Gather logits (b, s/cp, vocab_size/tp) to (b, s, vocab_size). Collective, no gradient."""
        if isinstance(logits, DTensor):
            logits = logits.full_tensor()
        if self._mesh is not None:
            logits = unshard_sequence(logits, self._mesh, method=self._method)
        return logits


def sequence_shard(
    seq_len: int,
    cp_mesh: DeviceMesh,
    device: torch.device | None = None,
    *,
    method: ContextParallelMethod,
) -> torch.Tensor:
    """Return the positions (seq_len / degree,) of each sequence that this rank holds, in order.

    A causal mask gives late positions more work. Ulysses balances it over heads. With allgather,
    rank r of n holds chunks r and 2n-1-r of 2n, which are together the same work on all ranks.
    """
    positions = torch.arange(seq_len, device=device)[None]
    shards = _to_shards(positions, cp_mesh.size(), method).view(cp_mesh.size(), -1)
    return shards[cp_mesh.get_local_rank()]


def unshard_sequence(
    shard: torch.Tensor, cp_mesh: DeviceMesh, *, method: ContextParallelMethod
) -> torch.Tensor:
    """Gather shards (b, s/n, ...) to (b, s, ...) in sequence order. Collective, no gradient."""
    gathered = DTensor.from_local(shard, cp_mesh, [Shard(1)], run_check=False).full_tensor()
    return _from_shards(gathered, cp_mesh.size(), method)


def _to_shards(t: torch.Tensor, degree: int, method: ContextParallelMethod) -> torch.Tensor:
    """Reorder a sequence (b, s, ...) into the shards of ranks 0 to n-1, concatenated."""
    if method == "ulysses":
        return t
    first, second = t.unflatten(1, (2, degree, -1)).unbind(1)  # each (b, n, s/2n, ...)
    return torch.stack([first, second.flip(1)], dim=2).flatten(1, 3)


def _from_shards(t: torch.Tensor, degree: int, method: ContextParallelMethod) -> torch.Tensor:
    """The inverse of ``_to_shards``."""
    if method == "ulysses":
        return t
    first, second = t.unflatten(1, (degree, 2, -1)).unbind(2)
    return torch.cat([first, second.flip(1)], dim=1).flatten(1, 2)


class _Whole(nn.Module):
    """The forward of ``module``. Hooks see whole sequences here, and shards at ``module``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> torch.Tensor:
        # Its class at call time, because data parallel changes it.
        return type(self.module).forward(self.module, *args)


class Ulysses(nn.Module):
    """Attention by heads: an all-to-all gives each rank the whole sequence of some heads."""

    def __init__(self, inner: nn.Module, cp_mesh: DeviceMesh) -> None:
        super().__init__()
        self.inner, self.degree = inner, cp_mesh.size()
        self.exchange = _exchange_over(cp_mesh.get_group())

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, document_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """q (b, s/n, h, k), k and v (b, s/n, h_kv, k) to (b, s/n, h, k); document_ids (b, s)."""
        # Every rank needs equally many key heads, and the queries that attend to them.
        copies = math.lcm(k.shape[2], self.degree) // k.shape[2]
        if copies > 1:
            k, v = (t.repeat_interleave(copies, dim=2) for t in (k, v))
        heads = [t.unflatten(2, (self.degree, -1)) for t in (q, k, v)]  # each (b, s/n, n, h/n, k)
        sizes = [t.shape[3] for t in heads]
        whole = _to_heads(torch.cat(heads, dim=3), self.exchange)  # (b, s, h/n of q, k and v, k)
        out = self.inner(*whole.split(sizes, dim=2), document_ids)
        return _to_sequence(out, self.degree, self.exchange)


class UlyssesDeltaNet(nn.Module):
    """Shards a gated delta net by key heads or, on more ranks than those, by value heads."""

    def __init__(
        self, inner: nn.Module, cp_mesh: DeviceMesh, method: ContextParallelMethod
    ) -> None:
        super().__init__()
        self.inner, self.degree = inner, cp_mesh.size()
        self.exchange = _exchange_over(cp_mesh.get_group())
        self.rank, self.method = cp_mesh.get_local_rank(), method

    def forward(
        self,
        qkv: torch.Tensor,
        gates: torch.Tensor,
        conv: torch.Tensor,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        document_ids: torch.Tensor | None,
    ) -> torch.Tensor:
        """qkv (b, s/n, heads, group), gates (b, s/n, heads, ratio, 2); document_ids (b, s).

        conv, a_log and dt_bias are those of all heads.
        """
        ratio = gates.shape[3]
        splits = max(1, self.degree // qkv.shape[2])
        conv = self._shard_heads(_split_heads(conv, ratio, splits, self.inner.module))
        a_log, dt_bias = self._shard_heads(a_log), self._shard_heads(dt_bias)
        qkv = _split_heads(qkv.movedim(2, 0).movedim(-1, 1), ratio, splits, self.inner.module)
        qkv = qkv.movedim(1, -1).movedim(0, 2)
        gates = gates.unflatten(3, (splits, -1)).flatten(2, 3)
        sent = torch.cat([qkv, gates.flatten(3)], dim=-1).unflatten(2, (self.degree, -1))
        whole = _to_heads(sent, self.exchange)  # (b, s, heads / n, ...)
        whole = _from_shards(whole, self.degree, self.method)
        qkv, gates = whole.split([qkv.shape[-1], 2 * gates.shape[3]], dim=-1)
        gates = gates.unflatten(-1, (-1, 2))
        out = self.inner(qkv, gates, conv, a_log, dt_bias, document_ids)
        return _to_sequence(_to_shards(out, self.degree, self.method), self.degree, self.exchange)

    def _shard_heads(self, weight: torch.Tensor) -> torch.Tensor:
        """Take the weights of this rank's heads; gradients are summed over ranks like others."""
        return weight.chunk(self.degree)[self.rank]


def _split_heads(t: torch.Tensor, ratio: int, splits: int, inner: Any) -> torch.Tensor:
    """Split t (heads, q k v, ...) into (heads * splits, q k v/splits, ...), repeating q and k."""
    if splits == 1:
        return t
    q, k, v = t.split([inner.key_dim, inner.key_dim, ratio * inner.value_dim], dim=1)
    q, k = (x[:, None].expand(-1, splits, *x.shape[1:]) for x in (q, k))
    return torch.cat([q, k, v.unflatten(1, (splits, -1))], dim=2).flatten(0, 1)


def _to_heads(t: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """All-to-all from sequence shards (b, s/n, n, h/n, ...) to head shards (b, s, h/n, ...)."""
    return exchange(t.movedim(2, 0)).transpose(0, 1).flatten(1, 2)


def _to_sequence(t: torch.Tensor, degree: int, exchange: Exchange) -> torch.Tensor:
    """All-to-all from head shards (b, s, h/n, k) to sequence shards (b, s/n, h, k)."""
    exchanged = exchange(t.unflatten(1, (degree, -1)).transpose(0, 1))
    return exchanged.movedim(0, 2).flatten(2, 3)


def _exchange_over(group: dist.ProcessGroup) -> Exchange:
    all_to_all_of = all_to_all()
    return lambda t: all_to_all_of(t.contiguous(), None, None, group)


class AllGather(nn.Module):
    """Attention by queries: each rank gathers all keys and values for its two chunks of queries.

    Of 2n chunks, rank r has r and 2n - 1 - r: under a causal mask, each such pair is equal work.
    """

    def __init__(self, inner: nn.Module, cp_mesh: DeviceMesh) -> None:
        super().__init__()
        self.inner, self.cp_mesh = inner, cp_mesh
        self.rank, self.degree = cp_mesh.get_local_rank(), cp_mesh.size()

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, document_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """Two chunks of the sequence: q (b, s/n, h, k) to the same; document_ids (b, s)."""
        k, v = self._gather(torch.stack([k, v])).unbind()
        size, outs = q.shape[1] // 2, []
        for index, chunk in enumerate((self.rank, 2 * self.degree - 1 - self.rank)):
            own = q[:, index * size : (index + 1) * size]
            # The causal mask hides all later keys.
            end = (chunk + 1) * size
            ids = None if document_ids is None else document_ids[:, :end]
            outs.append(self.inner(own, k[:, :end], v[:, :end], ids))
        return torch.cat(outs, dim=1)

    def _gather(self, kv: torch.Tensor) -> torch.Tensor:
        """Gather (2, b, s/n, h, k) of each rank's two chunks to (2, b, s, h, k) in order."""
        parts = DTensor.from_local(kv[None], self.cp_mesh, [Shard(0)], run_check=False)
        whole = parts.redistribute(placements=[Replicate()])
        # Each rank's queries add to the gradient of every key.
        first, second = whole.to_local(grad_placements=[Partial()]).chunk(2, dim=3)
        chunks = torch.cat([first, second.flip(0)])  # (2n, 2, b, s/2n, h, k)
        return chunks.movedim(0, 2).flatten(2, 3)
