"""AdamW over pieces of a rank's part of each tensor, with moments in a dtype of their own."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch.optim.adamw import adamw

from runtime.distributed import local_part

# No vector register of a CPU we know is wider.
VECTOR_BYTES = 64
# Elements that are updated at once: in float32, 64 MiB for each of the copies.
CHUNK = 1 << 24

Piece = tuple[torch.Tensor, ...]


class ChunkedAdamW(torch.optim.AdamW):
    """Fused AdamW whose result does not depend on where shards end.

    On a CPU PyTorch's kernel rounds the last elements, which do not fill a vector, differently from
    the rest. Pieces that have such elements are updated in padded copies.

    ``moment_dtype``: that of both moments between steps; None: the weights'. PyTorch's kernel wants
    one dtype, so each piece's moments are copied to the weights', updated and used in it, and then
    rounded to nearest (so does DeepSeek-V3, to bfloat16: arXiv 2412.19437, section 3.3.2).
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        moment_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        self.moment_dtype = moment_dtype
        super().__init__(params, **options)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Mutates parameters and state; obeys ``found_inf`` as a fused optimizer does."""
        found_inf = getattr(self, "found_inf", None)
        for group in self.adamw_groups():
            for pieces in _chunks(self._entries(group)):
                _update(pieces, group, found_inf)

    def adamw_groups(self) -> list[dict[str, Any]]:
        """The groups that AdamW updates."""
        return self.param_groups

    def _entries(self, group: Mapping[str, Any]) -> Iterator[Piece]:
        """Of each parameter: itself, its gradient, both moments and the step."""
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter, dtype=self.moment_dtype)
                state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=self.moment_dtype)
            yield parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"], state["step"]

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Moments of another dtype are converted."""
        # PyTorch would first convert all to the weights' dtype: twice the memory for a while.
        super().load_state_dict({**state_dict, "state": {}})
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        for index, parameter in zip(saved, own, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                dtype = value.dtype if name == "step" else self.moment_dtype or parameter.dtype
                self.state[parameter][name] = value.to(device=parameter.device, dtype=dtype)


def _update(pieces: list[Piece], group: Mapping[str, Any], found_inf: torch.Tensor | None) -> None:
    """Each piece: parts of a parameter, of its gradient and of both moments, 1-D, and the step."""
    *kept, steps = (list(tensors) for tensors in zip(*pieces, strict=True))
    used = [[_pad(t.to(p.dtype)) for t, p in zip(ts, kept[0], strict=True)] for ts in kept]
    beta1, beta2 = group["betas"]
    parameters, gradients, averages, squares = used
    adamw(
        parameters,
        gradients,
        averages,
        squares,
        [],
        steps,
        fused=True,
        found_inf=found_inf,
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )
    # The gradients were only read.
    for tensor, copy in chain.from_iterable(map(zip, kept[::2] + kept[3:], used[::2] + used[3:])):
        if copy is not tensor:
            tensor.copy_(copy[: tensor.numel()])


def _chunks(entries: Iterable[Piece]) -> Iterator[list[Piece]]:
    """This rank's parts of all tensors, flat, with their steps, ``CHUNK`` elements at most.

    A step is counted once, with the last part of its tensor; the others have copies.
    """
    pieces: list[Piece] = []
    count = 0
    for *tensors, step in entries:
        flat = [local_part(tensor).view(-1) for tensor in tensors]
        cut = list(zip(*(tensor.split(CHUNK) for tensor in flat), strict=True))
        for parts in cut:
            if count + parts[0].numel() > CHUNK:
                yield pieces
                pieces, count = [], 0
            pieces.append((*parts, step if parts is cut[-1] else step.clone()))
            count += parts[0].numel()
    if pieces:
        yield pieces


def _pad(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` itself if it is whole vectors, else a copy that is."""
    missing = -tensor.numel() % (VECTOR_BYTES // tensor.element_size())
    return F.pad(tensor, (0, missing)) if missing else tensor
