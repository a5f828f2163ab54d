"""A loss or gradient that is not finite never updates the weights: decided on the device."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from config.job_config import Numerics
from runtime.distributed import local_part
from runtime.log import logger


class NonfiniteGuard:
    """Masks updates of a fused optimizer: weights, moments and step counts stay as they are.

    All ranks decide the same. Once so many bad steps follow each other that the run must end, all
    updates are masked until the host finds out: it waits for the device only in ``look`` and
    ``state_dict``.
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
        """``parameters``: all that ``optimizer`` has, by FQN. ``fqns``: those of the whole model.

        ``weight_mesh`` has every rank. Sets ``optimizer.found_inf``, which is what makes a fused
        update do nothing (``torch.amp.GradScaler`` uses it too).
        """
        assert all(group["fused"] for group in optimizer.param_groups), "found_inf has no effect"
        self._limit = 1 if config.on_nonfinite == "stop" else config.max_skipped
        # The first that is bad is named, so causes come first: a bad loss makes gradients bad.
        gradients = [f"the gradient of {fqn}" for fqn in fqns]
        self._whats = ["the loss", *gradients, "the gradient norm, but no gradient,"]
        # Offloaded parameters are updated on the host.
        device = local_part(next(iter(parameters.values()))).device
        # A pipeline stage has some of the gradients.
        places = [0, *(1 + fqns.index(fqn) for fqn in parameters), len(fqns) + 1]
        self._places = torch.tensor(places, device=device)
        self._nowhere = torch.tensor(len(self._whats), device=device)
        names = ("skipped", "in_a_row", "longest", "first_step", "first_place")
        self._counts = {name: torch.zeros_like(self._nowhere) for name in names}
        self.found_inf = torch.zeros((), device=device)
        """Not 0 if the last update was masked."""
        optimizer.found_inf = self.found_inf  # type: ignore[attr-defined]
        sizes = enumerate(weight_mesh.shape)
        self._groups = [weight_mesh.get_group(dim) for dim, size in sizes if size > 1]
        self.skipped = 0
        """Updates masked so far, as of the last ``look``."""

    @torch.no_grad()
    def check(
        self, step: int, *, loss: torch.Tensor, norms: list[torch.Tensor], grad_norm: torch.Tensor
    ) -> None:
        """Mask the next update if something is not finite on any rank. A collective.

        ``loss``: this rank's part, 0-d. ``norms``: the ``local_norms`` of all parameters.
        ``grad_norm``: what ``clip_grad_norm_`` returned.
        """
        values = (loss.to(self._nowhere.device), torch.stack(norms), grad_norm)
        is_finite = torch.cat([value.isfinite().view(-1) for value in values])
        place = torch.where(is_finite, self._nowhere, self._places).min()
        for group in self._groups:
            dist.all_reduce(place, op=dist.ReduceOp.MIN, group=group)
        self._mask(step, place)

    def _mask(self, step: int, place: torch.Tensor) -> None:
        counts = self._counts
        is_bad = place < self._nowhere
        is_first = is_bad & (counts["first_step"] == 0)
        counts["first_step"].masked_fill_(is_first, step)
        counts["first_place"].copy_(torch.where(is_first, place, counts["first_place"]))
        counts["in_a_row"].add_(1).mul_(is_bad)
        torch.maximum(counts["longest"], counts["in_a_row"], out=counts["longest"])
        is_masked = is_bad | (counts["longest"] >= self._limit)
        counts["skipped"].add_(is_masked)
        self.found_inf.copy_(is_masked)

    def look(self) -> bool:
        """Whether the run must end here, unsaved. Waits for the device.

        Logs what was first not finite since the last look.
        """
        counts = self._read()
        if counts["first_step"] > 0:
            logger.warning(
                "step %d: %s is not finite on some rank; %d updates skipped since, %d in all",
                counts["first_step"], self._whats[counts["first_place"]],
                counts["skipped"] - self.skipped, counts["skipped"],
            )  # fmt: skip
        self.skipped = counts["skipped"]
        self._counts["first_step"].zero_()
        return counts["longest"] >= self._limit

    def state_dict(self) -> dict[str, int]:
        """Waits for the device."""
        counts = self._read()
        return {name: counts[name] for name in ("skipped", "in_a_row")}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        for name, count in self._counts.items():
            count.fill_(state_dict.get(name, 0))
        self.skipped = state_dict["skipped"]

    def _read(self) -> dict[str, int]:
        values = torch.stack(list(self._counts.values())).tolist()
        return dict(zip(self._counts, values, strict=True))
