"""Expert parallel: each rank has some of the experts, and tokens travel to those they chose."""

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
    """Shard the experts over "ep" of ``expert_mesh``, if there is one. Mutates ``moes``' modules.

    A sequence is spread over ``cp_mesh`` and ``tp_mesh``, so its tokens are counted over both: for
    experts, tensor parallel ranks are ranks with other tokens.
    """
    sequence_meshes = [mesh for mesh in (cp_mesh, tp_mesh) if mesh.size() > 1]
    for moe in moes:
        if sequence_meshes:
            moe.tally = Summed(sequence_meshes)
        if expert_mesh is None:
            continue
        ep_mesh = expert_mesh["ep"]
        for name, parameter in list(moe.experts.named_parameters()):
            sharded = distribute_tensor(parameter, ep_mesh, [Shard(0)], src_data_rank=None)
            moe.experts.register_parameter(name, nn.Parameter(sharded))
        if ep_mesh.size() > 1:
            moe.inner = AllToAll(ep_mesh)
    if expert_mesh is not None:
        logger.info("experts: %d layers of them on %d ranks", len(moes), expert_mesh["ep"].size())


class AllToAll(nn.Module):
    """In place of ``InnerExperts``: tokens travel to the ranks of their experts, and back."""

    def __init__(self, ep_mesh: DeviceMesh) -> None:
        super().__init__()
        self.group, self.degree = ep_mesh.get_group(), ep_mesh.size()
        self.all_to_all = all_to_all()

    def forward(self, x: torch.Tensor, counts: torch.Tensor, experts: nn.Module) -> torch.Tensor:
        """x (n, d), sorted by expert of all ranks; counts (e,) of all experts. To (n, d)."""
        # (ranks, experts of each): what goes to each rank, and what comes from each.
        sent = counts.view(self.degree, -1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        to, from_ = torch.stack([sent.sum(dim=1), received.sum(dim=1)]).tolist()
        arrived = self.all_to_all(x, from_, to, self.group)
        return self.all_to_all(experts(arrived, received), to, from_, self.group)


class Summed(nn.Module):
    """In place of ``MoE.tally``: counts are summed over the ranks that share a sequence."""

    def __init__(self, meshes: Sequence[DeviceMesh]) -> None:
        super().__init__()
        self.groups = [mesh.get_group() for mesh in meshes]

    def forward(self, counts: torch.Tensor) -> torch.Tensor:
        total = counts.clone()
        for group in self.groups:
            dist.all_reduce(total, group=group)
        return total
