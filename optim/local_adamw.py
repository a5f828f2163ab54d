"""PyTorch's fused AdamW (arXiv 1711.05101) on local shards, not on DTensors.

An operator on DTensors finds its placements first: milliseconds of the host per tensor in the first
update, and microseconds in each other one. AdamW is elementwise, so shards need no placements.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.optim.adamw import adamw

from optim.one_pass_adamw import ParameterState
from runtime.dtensor import to_local


class LocalAdamW(torch.optim.AdamW):
    """Fused AdamW, whose state is sharded as the parameters are."""

    moment_dtype: torch.dtype | None = None
    """Of both moments between updates; None: that of the weights."""
    state_names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    """Of tensors that have the parameter's shape."""
    found_inf: torch.Tensor | None = None
    """0-d, not 0 if the next update is skipped (as in ``torch.amp.GradScaler``)."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters. Mutates parameters and state."""
        for group in self.param_groups:
            if states := list(self.param_states(group)):
                tensors = zip(*(state.tensors for state in states), strict=True)
                steps = [state.step for state in states]
                update_fused([list(each) for each in tensors], steps, group, self.found_inf)

    def param_states(self, group: Mapping[str, Any]) -> Iterator[ParameterState]:
        """Local tensors of the parameters that have a gradient; starts state that is missing."""
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if not self.state[parameter]:
                self.init_state(parameter)
            state = self.state[parameter]
            sharded = [parameter, parameter.grad, *(state[name] for name in self.state_names)]
            yield ParameterState(state["step"], [to_local(tensor) for tensor in sharded])

    def init_state(self, parameter: nn.Parameter) -> None:
        state = self.state[parameter]
        state["step"] = torch.zeros((), device=parameter.device)
        state["exp_avg"] = torch.zeros_like(parameter, dtype=self.moment_dtype)
        state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=self.moment_dtype)


def update_fused(
    tensors: Sequence[list[torch.Tensor]],
    steps: list[torch.Tensor],
    group: Mapping[str, Any],
    found_inf: torch.Tensor | None,
) -> None:
    """Update weights by PyTorch's kernel, with the options of their ``group``.

    ``tensors``: weights, gradients and both moments. Mutates all but the gradients, and ``steps``.
    """
    weights, gradients, exp_avgs, exp_avg_sqs = tensors
    beta1, beta2 = group["betas"]
    adamw(
        weights,
        gradients,
        exp_avgs,
        exp_avg_sqs,
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
