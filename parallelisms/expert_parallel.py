"""Expert parallel: tokens are dispatched to their experts' ranks (GShard, arXiv 2006.16668)."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from runtime.compat import all_to_all
from runtime.log import logger


def apply_expert_parallel(
    moes: list[Any], expert_mesh: DeviceMesh | None, *, cp_mesh: DeviceMesh, tp_mesh: DeviceMesh
) -> None:
    """Shard the experts' weights (e, ...) over "ep" of ``expert_mesh``, if given. Mutates ``moes``.

    Sequences are sharded over ``cp_mesh`` and ``tp_mesh``, so token counts are all-reduced over
    both: inside experts, tensor parallel ranks hold different tokens.
    """
    sequence_meshes = [mesh for mesh in (cp_mesh, tp_mesh) if mesh.size() > 1]
    for moe in moes:
        if sequence_meshes:
            moe.all_reduce_counts = AllReduceCounts(sequence_meshes)
        if expert_mesh is None:
            continue
        ep_mesh = expert_mesh["ep"]
        for name, parameter in list(moe.experts.named_parameters()):
            sharded = distribute_tensor(parameter, ep_mesh, [Shard(0)], src_data_rank=None)
            moe.experts.register_parameter(name, nn.Parameter(sharded))
        if ep_mesh.size() > 1:
            moe.dispatcher = AllToAllDispatcher(ep_mesh)
    if expert_mesh is not None:
        logger.info("expert parallel: %d MoE layers, ep = %d", len(moes), expert_mesh["ep"].size())


class AllToAllDispatcher(nn.Module):
    """Replacement of ``LocalDispatcher``: dispatch tokens to their experts' ranks, and combine."""

    def __init__(self, ep_mesh: DeviceMesh) -> None:
        super().__init__()
        self.group, self.degree = ep_mesh.get_group(), ep_mesh.size()
        self.all_to_all = all_to_all()

    def forward(self, x: torch.Tensor, counts: torch.Tensor, experts: nn.Module) -> torch.Tensor:
        """x (n, d), sorted by global expert; counts (e,) of its tokens. To (n, d). Collective."""
        # (ep, e / ep): this rank's tokens for each rank, and each rank's tokens for this one.
        sent = counts.view(self.degree, -1)
        # As of tokens, so that selective recomputation saves the result.
        received = self.all_to_all(sent, None, None, self.group)
        n_sent, n_received = self.split_sizes(sent, received)
        dispatched = self.all_to_all(x, n_received, n_sent, self.group)
        return self.all_to_all(experts(dispatched, received), n_sent, n_received, self.group)

    def split_sizes(self, sent: torch.Tensor, received: torch.Tensor) -> list[list[int]]:
        """Rows to and from each rank, by counts (ep, e / ep). Waits for the device."""
        on_device = torch.stack([sent.sum(dim=1), received.sum(dim=1)])
        # By a copy, which selective recomputation saves, so that backward does not wait.
        sizes: list[list[int]] = on_device.cpu().tolist()
        return sizes


class AllReduceCounts(nn.Module):
    """All-reduce of token counts (b, e) over the ranks that share the sequences. Collective."""

    def __init__(self, meshes: Sequence[DeviceMesh]) -> None:
        super().__init__()
        self.groups = [mesh.get_group() for mesh in meshes]

    def forward(self, counts: torch.Tensor) -> torch.Tensor:
        total = counts.clone()
        for group in self.groups:
            dist.all_reduce(total, group=group)
        return total
