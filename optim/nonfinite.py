"""Skip optimizer updates whose loss or gradients are not finite, without a host-device sync."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from config.job_config import Numerics
from runtime.dtensor import to_local
from runtime.log import logger


class NonfiniteGuard:
    """Skips updates of an optimizer: weights, moments and step counts stay unchanged.

    All ranks skip the same updates. After too many consecutive nonfinite steps it skips all further
    ones, and ``should_stop`` returns True. Only that and ``state_dict`` wait for the device, and
    ``step`` unless the optimizer is PyTorch's fused AdamW or one of ``optim``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        *,
        fqns: list[str],
        weight_mesh: DeviceMesh,
        config: Numerics,
    ) -> None:
        """``parameters``: those of ``optimizer``, by FQN. ``fqns``: FQNs of the whole model.

        ``weight_mesh`` has every rank. Sets ``found_inf`` of a fused AdamW, which then skips its
        update (as in ``torch.amp.GradScaler``).
        """
        is_adamw = isinstance(optimizer, torch.optim.AdamW) and not _has_own_step(optimizer)
        obeys = is_adamw and all(group["fused"] for group in optimizer.param_groups)
        self.step: Callable[[], object] = (
            optimizer.step if obeys else partial(self._step_on_host, optimizer)
        )
        """Update the weights, unless the update is skipped."""
        self._limit = 1 if config.on_nonfinite == "stop" else config.max_skipped
        # The first nonfinite value is logged, so causes come first: a loss before its gradients.
        gradients = [f"the gradient of {fqn}" for fqn in fqns]
        self._value_names = ["the loss", *gradients, "the gradient norm (each gradient is finite)"]
        # With CPU offload, updates run on the host.
        device = to_local(next(iter(parameters.values()))).device
        # A pipeline stage has only some of the gradients.
        indices = [0, *(1 + fqns.index(fqn) for fqn in parameters), len(fqns) + 1]
        self._indices = torch.tensor(indices, device=device)
        self._no_index = torch.tensor(len(self._value_names), device=device)
        names = ("skipped", "in_a_row", "longest", "first_step", "first_index")
        self._counts = {name: torch.zeros_like(self._no_index) for name in names}
        self.found_inf = torch.zeros((), device=device)
        """0-d, not 0 if the last update was skipped."""
        if obeys:
            optimizer.found_inf = self.found_inf  # type: ignore[attr-defined]
        sizes = enumerate(weight_mesh.shape)
        self._groups = [weight_mesh.get_group(dim) for dim, size in sizes if size > 1]
        self.skipped = 0
        """Updates skipped so far, as of the last ``should_stop``."""

    @torch.no_grad()
    def update_found_inf(
        self,
        step: int | torch.Tensor,
        *,
        loss: torch.Tensor,
        norms: list[torch.Tensor],
        grad_norm: torch.Tensor,
    ) -> None:
        """Skip the next update if any value is not finite on any rank. Collective.

        ``step``: 1-based; a tensor if this is captured. ``loss``: this rank's, 0-d.
        ``norms``: ``local_norms`` of all parameters. ``grad_norm``: result of
        ``clip_grad_norm_``, 0-d.
        """
        values = (loss.to(self._no_index.device), torch.stack(norms), grad_norm)
        is_finite = torch.cat([value.isfinite().view(-1) for value in values])
        index = torch.where(is_finite, self._no_index, self._indices).min()
        for group in self._groups:
            dist.all_reduce(index, op=dist.ReduceOp.MIN, group=group)
        self._decide(step, index)

    def _decide(self, step: int | torch.Tensor, index: torch.Tensor) -> None:
        counts = self._counts
        is_bad = index < self._no_index
        is_first = is_bad & (counts["first_step"] == 0)
        counts["first_step"].copy_(torch.where(is_first, step, counts["first_step"]))
        counts["first_index"].copy_(torch.where(is_first, index, counts["first_index"]))
        counts["in_a_row"].add_(1).mul_(is_bad)
        torch.maximum(counts["longest"], counts["in_a_row"], out=counts["longest"])
        is_skipped = is_bad | (counts["longest"] >= self._limit)
        counts["skipped"].add_(is_skipped)
        self.found_inf.copy_(is_skipped)

    def _step_on_host(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.found_inf.item():
            optimizer.step()

    def should_stop(self) -> bool:
        """True if the run must stop without saving. Waits for the device.

        Logs the first nonfinite value since the last call.
        """
        counts = self._read()
        if counts["first_step"] > 0:
            logger.warning(
                "step %d: %s is not finite on some rank; %d updates skipped since, %d in total",
                counts["first_step"], self._value_names[counts["first_index"]],
                counts["skipped"] - self.skipped, counts["skipped"],
            )  # fmt: skip
        self.skipped = counts["skipped"]
        self._counts["first_step"].zero_()
        return counts["longest"] >= self._limit

    def state_dict(self) -> dict[str, int]:
        """Counts to save in a checkpoint. Waits for the device."""
        counts = self._read()
        return {name: counts[name] for name in ("skipped", "in_a_row")}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        for name, count in self._counts.items():
            count.fill_(state_dict.get(name, 0))
        self.skipped = state_dict["skipped"]

    def _read(self) -> dict[str, int]:
        values = torch.stack(list(self._counts.values())).tolist()
        return dict(zip(self._counts, values, strict=True))


def _has_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """True if the user's own code updates the weights, before or after PyTorch's."""
    # PyTorch wraps each class's step, which keeps its module.
    return type(optimizer).step.__module__.partition(".")[0] not in ("torch", __package__)
