"""Context parallel: each rank has a part of every sequence, and attention sees all of it.

``ulysses`` (arXiv 2309.14509): an all-to-all before attention trades sequence for heads, one after
it trades back. ``allgather`` (section 3.3.2 of arXiv 2407.21783): keys and values are gathered.
"""

import math
from typing import cast

import torch
import torch.nn as nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from config.job_config import ContextParallelMethod
from runtime.log import logger


def apply_context_parallel(
    attentions: list[nn.Module], cp_mesh: DeviceMesh, *, method: ContextParallelMethod
) -> None:
    """Wrap the ``inner`` of each module, that it attends to the sequence of all ranks.

    Mutates the modules. What enters the model must be ``sequence_part``'s part of the sequence,
    and ``document_ids`` those of the whole.
    """
    kind = {"ulysses": Ulysses, "allgather": AllGather}[method]
    for attention in attentions:
        attention.inner = kind(cast(nn.Module, attention.inner), cp_mesh)
    logger.info("context parallel: %s in %d layers on %d ranks",
                method, len(attentions), cp_mesh.size())  # fmt: skip


def sequence_part(
    seq_len: int, cp_mesh: DeviceMesh, *, method: ContextParallelMethod
) -> torch.Tensor:
    """The positions (seq_len / degree,) that this rank has of each sequence, in its order.

    A causal mask gives late positions more work. Ulysses shares it by heads; where keys travel,
    rank r of n has chunk r and chunk 2n-1-r of 2n, which together are the same work for all.
    """
    return _parts(seq_len, cp_mesh.size(), method)[cp_mesh.get_local_rank()]


def whole_sequence(
    part: torch.Tensor, cp_mesh: DeviceMesh, *, method: ContextParallelMethod
) -> torch.Tensor:
    """The ranks' parts (b, s/n, ...) in the order of the sequence: (b, s, ...). No gradient."""
    gathered = DTensor.from_local(part, cp_mesh, [Shard(1)], run_check=False).full_tensor()
    order = _parts(gathered.shape[1], cp_mesh.size(), method).flatten()
    return gathered[:, order.argsort().to(part.device)]


def _parts(seq_len: int, degree: int, method: ContextParallelMethod) -> torch.Tensor:
    """Positions (degree, seq_len / degree)."""
    positions = torch.arange(seq_len)
    if method == "ulysses":
        return positions.view(degree, -1)
    chunks = positions.view(2 * degree, -1)
    return torch.cat([chunks[:degree], chunks[degree:].flip(0)], dim=1)


class Ulysses(nn.Module):
    def __init__(self, inner: nn.Module, cp_mesh: DeviceMesh) -> None:
        super().__init__()
        self.inner, self.group, self.degree = inner, cp_mesh.get_group(), cp_mesh.size()

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, document_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """Parts of the sequence, all heads (b, s/n, h, k); document_ids (b, s)."""
        # Ranks must get equal numbers of heads, and with them the queries that attend to them.
        copies = math.lcm(k.shape[2], self.degree) // k.shape[2]
        if copies > 1:
            k, v = (t.repeat_interleave(copies, dim=2) for t in (k, v))
        heads = [t.unflatten(2, (self.degree, -1)) for t in (q, k, v)]  # each (b, s/n, n, h/n, k)
        sizes = [t.shape[3] for t in heads]
        exchanged = self._exchange(torch.cat(heads, dim=3).movedim(2, 0))
        whole = exchanged.transpose(0, 1).flatten(1, 2)  # (b, s, h/n of q, k and v, k)
        out = self.inner(*whole.split(sizes, dim=2), document_ids)
        exchanged = self._exchange(out.unflatten(1, (self.degree, -1)).transpose(0, 1))
        return exchanged.movedim(0, 2).flatten(2, 3)

    def _exchange(self, t: torch.Tensor) -> torch.Tensor:
        """Of t (n, ...): t[i] goes to rank i, and what comes from there is in its place."""
        return all_to_all_single_autograd(t.contiguous(), None, None, self.group)


class AllGather(nn.Module):
    def __init__(self, inner: nn.Module, cp_mesh: DeviceMesh) -> None:
        super().__init__()
        self.inner, self.cp_mesh = inner, cp_mesh
        self.rank, self.degree = cp_mesh.get_local_rank(), cp_mesh.size()

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, document_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """Two chunks of the sequence (b, s/n, h, k); document_ids (b, s)."""
        k, v = self._gather(torch.stack([k, v])).unbind()
        size, outs = q.shape[1] // 2, []
        for index, chunk in enumerate((self.rank, 2 * self.degree - 1 - self.rank)):
            own = q[:, index * size : (index + 1) * size]
            # Nothing attends to what comes later.
            end = (chunk + 1) * size
            ids = None if document_ids is None else document_ids[:, :end]
            outs.append(self.inner(own, k[:, :end], v[:, :end], ids))
        return torch.cat(outs, dim=1)

    def _gather(self, kv: torch.Tensor) -> torch.Tensor:
        """(2, b, s/n, h, k) of each rank's two chunks to (2, b, s, h, k) in order."""
        parts = DTensor.from_local(kv[None], self.cp_mesh, [Shard(0)], run_check=False)
        whole = parts.redistribute(placements=[Replicate()])
        # Each rank's queries add to the gradient of every key.
        first, second = whole.to_local(grad_placements=[Partial()]).chunk(2, dim=3)
        chunks = torch.cat([first, second.flip(0)])  # (2n, 2, b, s/2n, h, k)
        return chunks.movedim(0, 2).flatten(2, 3)
