"""Local shards of DTensor weights, for modules that compute without DTensor dispatch."""

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from kernels.embedding import embedding


def to_local_with_partial_grad(weight: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor; a plain tensor is returned unchanged."""
    if not isinstance(weight, DTensor):
        return weight
    # Ranks use a replicated weight for different tokens or heads, so gradients are partial sums.
    placements = [Partial() if p.is_replicate() else p for p in weight.placements]
    return weight.to_local(grad_placements=placements)


class VocabularyParallelEmbedding(nn.Embedding):
    """Embedding whose rows are sharded (Megatron-LM: arXiv 1909.08053).

    PyTorch's row-wise style computes the gradient of all rows on each rank: 2 GB in float32 for
    Llama 8B.
    """

    tp_mesh: DeviceMesh

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weight = to_local_with_partial_grad(self.weight)
        # Only the last rank may have fewer rows.
        most = -(-self.num_embeddings // self.tp_mesh.size())
        rows = tokens - self.tp_mesh.get_local_rank() * most
        is_elsewhere = (rows < 0) | (rows >= len(weight))
        # Tokens of other ranks read any rows, but not all the same: adding to one row is slow.
        out = embedding(rows % len(weight), weight).masked_fill(is_elsewhere.unsqueeze(-1), 0.0)
        partial = DTensor.from_local(out, self.tp_mesh, [Partial()], run_check=False)
        return partial.redistribute(placements=[Shard(1)]).to_local()
