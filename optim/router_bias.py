"""Auxiliary-loss-free load balancing of experts by a router bias (arXiv 2408.15664)."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from runtime.compat import foreach


class ExpertBalancer:
    """Updates each MoE layer's router ``bias`` from its ``tokens_per_expert`` after a step.

    The bias decreases by ``rate`` for an expert above the layer's mean load, and increases by
    ``rate`` for one below it. All ranks that hold a layer apply the same update.
    """

    def __init__(
        self, moes: list[Any], data_mesh: DeviceMesh, *, rate: float, device: torch.device
    ) -> None:
        self._moes, self._mesh, self._rate = moes, data_mesh, rate
        self._weights = [moe.balance_weight for moe in moes]
        # Of the last step: largest tokens_per_expert over the mean of its layer.
        self._max_ratio = torch.ones((), dtype=torch.float64, device=device)

    def set_batch_fraction(self, fraction: float) -> None:
        """Scale the balance loss to a step with ``fraction`` of the global batch's sequences."""
        for moe, weight in zip(self._moes, self._weights, strict=True):
            moe.balance_weight = weight / fraction

    @torch.no_grad()
    def update(self, found_inf: torch.Tensor) -> None:
        """Update the biases and reset ``tokens_per_expert``. Collective.

        ``found_inf``: 0-d; not 0 if the step was skipped, which then moves no bias. Mutates the MoE
        layers; never waits for the device.
        """
        if not self._moes:
            return
        loads = torch.stack([moe.tokens_per_expert for moe in self._moes])
        for dim in ("batch", "cp", "tp"):
            group = self._mesh.get_group(dim)
            if group.size() > 1:
                dist.all_reduce(loads, group=group)
        means = loads.double().mean(dim=1, keepdim=True)
        # Backward, which counts tokens, does not reach layers below the first trainable weight.
        self._max_ratio = (loads / means).nan_to_num(nan=0.0).max()
        rate = self._rate * (found_inf == 0).to(loads.device)
        deltas = rate * (means - loads).sign().to(self._moes[0].bias.dtype)
        foreach("add_", [moe.bias for moe in self._moes], list(deltas))
        foreach("zero_", [moe.tokens_per_expert for moe in self._moes])

    def max_load_ratio(self) -> dict[str, float]:
        """Return ``expert_load``: the largest expert load over its layer's mean. Collective."""
        max_ratio = self._max_ratio.clone()
        group = self._mesh.get_group("pp")
        if group.size() > 1:
            dist.all_reduce(max_ratio, op=dist.ReduceOp.MAX, group=group)
        return {"expert_load": max_ratio.item()}
