"""How evenly experts are loaded, and the bias that evens it out without a loss."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from runtime.compat import foreach


class ExpertBalance:
    """Reads the ``load`` of each layer's experts after a step, and moves their ``bias``.

    The bias of an expert that got more than its share goes down by ``rate``, that of one that got
    less up (arXiv 2408.15664). All ranks with a layer make the same move.
    """

    def __init__(
        self, moes: list[Any], data_mesh: DeviceMesh, *, rate: float, device: torch.device
    ) -> None:
        self._moes, self._mesh, self._rate = moes, data_mesh, rate
        self._weights = [moe.balance_weight for moe in moes]
        # In the last step, the greatest load of an expert over the mean of its layer.
        self._worst = torch.ones((), dtype=torch.float64, device=device)

    def begin_step(self, share: float) -> None:
        """``share``: this step's sequences as a fraction of the global batch; balance weights were
        set for a whole one."""
        for moe, weight in zip(self._moes, self._weights, strict=True):
            moe.balance_weight = weight / share

    @torch.no_grad()
    def finish_step(self, found_inf: torch.Tensor) -> None:
        """``found_inf``: 0-d, not 0 if the update was masked. A collective; no host waits."""
        if not self._moes:
            return
        loads = torch.stack([moe.load for moe in self._moes])
        for dim in ("batch", "cp", "tp"):
            group = self._mesh.get_group(dim)
            if group.size() > 1:
                dist.all_reduce(loads, group=group)
        means = loads.double().mean(dim=1, keepdim=True)
        self._worst = (loads / means).max()
        rate = self._rate * (found_inf == 0).to(loads.device)
        moves = rate * (means - loads).sign().to(self._moes[0].bias.dtype)
        foreach("add_", [moe.bias for moe in self._moes], list(moves))
        foreach("zero_", [moe.load for moe in self._moes])

    def look(self) -> dict[str, float]:
        """For metrics: the greatest load of any expert over the mean of its layer. A collective."""
        worst = self._worst.clone()
        group = self._mesh.get_group("pp")
        if group.size() > 1:
            dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
        return {"expert_load": worst.item()}
