"""AdamW whose moments may have another dtype than the weights, and whose weights remainders."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from optim.local_adamw import LocalAdamW, update_fused
from optim.one_pass_adamw import CHUNK, ParameterState, one_pass_adamw

# No known CPU has wider vector registers.
VECTOR_BYTES = 64

Segment = tuple[torch.Tensor, ...]


class ChunkedAdamW(LocalAdamW):
    """Fused AdamW whose result does not depend on where shards end.

    ``moment_dtype``: dtype of both moments between steps; None: that of the weights. They are
    rounded to nearest (as DeepSeek-V3 does with bfloat16: arXiv 2412.19437, section 3.3.2).
    ``has_remainders``: bfloat16 weights learn as in float32 (``one_pass_adamw``).

    GPUs update in one pass. So do CPUs with remainders; else PyTorch's kernel is faster there. It
    needs one dtype, and rounds the last elements, which do not fill a vector, differently from the
    others: segments with such elements or with other moments are updated in copies.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        moment_dtype: torch.dtype | None = None,
        has_remainders: bool = False,
        **options: Any,
    ) -> None:
        self.moment_dtype, self.has_remainders = moment_dtype, has_remainders
        if has_remainders:
            self.state_names = (*self.state_names, "remainder")
        super().__init__(params, **options)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters. Mutates parameters and state."""
        for group in self.adamw_groups():
            states = list(self.param_states(group))
            if states and (self.has_remainders or states[0].step.is_cuda):
                one_pass_adamw(states, group, self.found_inf)
            else:
                for segments in _chunks(states):
                    _update(segments, group, self.found_inf)

    def adamw_groups(self) -> list[dict[str, Any]]:
        """Parameter groups that AdamW updates."""
        return self.param_groups

    def init_state(self, parameter: nn.Parameter) -> None:
        super().init_state(parameter)
        self.init_remainder(parameter)

    def init_remainder(self, parameter: nn.Parameter) -> None:
        """Start a parameter whose state is new from its bfloat16 value."""
        if self.has_remainders:
            remainder = torch.zeros_like(parameter, dtype=torch.int16)
            self.state[parameter]["remainder"] = remainder

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load options and state, converting moments to this optimizer's dtype."""
        # PyTorch would first convert all moments to the weights' dtype, doubling peak memory.
        super().load_state_dict({**state_dict, "state": {}})
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        for index, parameter in zip(saved, own, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                is_moment = name not in ("step", "remainder")
                dtype = (self.moment_dtype or parameter.dtype) if is_moment else value.dtype
                self.state[parameter][name] = value.to(device=parameter.device, dtype=dtype)


def _update(
    segments: list[Segment], group: Mapping[str, Any], found_inf: torch.Tensor | None
) -> None:
    """Update segments (parameter, gradient, exp_avg, exp_avg_sq, step), all but the step 1-D."""
    *stored, steps = (list(tensors) for tensors in zip(*segments, strict=True))
    padded = [[_pad(t.to(p.dtype)) for t, p in zip(ts, stored[0], strict=True)] for ts in stored]
    update_fused(padded, steps, group, found_inf)
    del stored[1], padded[1]  # The gradients were only read.
    for tensor, copy in chain.from_iterable(map(zip, stored, padded)):
        if copy is not tensor:
            tensor.copy_(copy[: tensor.numel()])


def _chunks(states: Iterable[ParameterState]) -> Iterator[list[Segment]]:
    """Split tensors into flat segments and group these, ``CHUNK`` elements at most.

    Each segment needs a step of its own to increment; the last one of a tensor gets the original.
    """
    chunk: list[Segment] = []
    count = 0
    for step, tensors in states:
        flat = [tensor.view(-1) for tensor in tensors]
        segments = list(zip(*(tensor.split(CHUNK) for tensor in flat), strict=True))
        for segment in segments:
            if count + segment[0].numel() > CHUNK:
                yield chunk
                chunk, count = [], 0
            chunk.append((*segment, step if segment is segments[-1] else step.clone()))
            count += segment[0].numel()
    if chunk:
        yield chunk


def _pad(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` itself if its length is a multiple of the vector's, else a padded copy."""
    missing = -tensor.numel() % (VECTOR_BYTES // tensor.element_size())
    return F.pad(tensor, (0, missing)) if missing else tensor
