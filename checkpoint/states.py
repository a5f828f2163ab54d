"""State of the model and the optimizer, keyed by FQN so that it loads on any mesh."""

from collections.abc import Collection
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from runtime.log import logger


class ModelState:
    """``TensorState`` of a model's parameters and persistent buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self._model)

    def load_targets(self, saved: Collection[str]) -> dict[str, Any]:
        return self.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_model_state_dict(self._model, state_dict)


class OptimizerState:
    """``TensorState`` with flat keys (``state.<FQN>.exp_avg``): pipeline stages never collide.

    Tensors only: on resume, the learning rate and other options come from the configuration.
    Numbers in the state, and those that steps add to parameter groups, are saved as tensors. A
    parameter that no update has changed has no state, and gets none by saving:
    ``get_optimizer_state_dict`` would make a step.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer`` has made no step yet."""
        self._optimizer = optimizer
        fqns = {parameter: fqn for fqn, parameter in model.named_parameters()}
        # In the order of the indices in the optimizer's own state dict.
        self._fqns = [fqns[p] for group in optimizer.param_groups for p in group["params"]]
        self._options = {key for group in optimizer.param_groups for key in group}

    def state_dict(self) -> dict[str, Any]:
        return {key: _to_tensor(value) for part in self._parts() for key, value in part.items()}

    def load_targets(self, saved: Collection[str]) -> dict[str, Any]:
        """Make the state that is missing; return all but parameters of which nothing is saved.

        Mutates the state, of which only what is loaded counts. Collective for Muon.
        """
        _init_state(self._optimizer)
        parts = self._parts()
        found = [part for part in parts if not part.keys().isdisjoint(saved)]
        if len(found) < len(parts):
            key = next(key for part in parts if part.keys().isdisjoint(saved) for key in part)
            fqn = key.partition(".")[2].rpartition(".")[0]
            text = "optimizer: the checkpoint has no state of %d parameters, the first is %s"
            logger.info(text, len(parts) - len(found), fqn)
        return {key: _to_tensor(value) for part in found for key, value in part.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``load_targets`` returned, and drop all other state."""
        packed = self._optimizer.state_dict()
        state = {
            index: _loaded(values, f"state.{self._fqns[index]}", state_dict)
            for index, values in packed["state"].items()
        }
        groups = []
        for group in packed["param_groups"]:
            own = {key: value for key, value in group.items() if key in self._options}
            for index in group["params"][:1]:
                own |= _loaded(self._added(group), f"param_groups.{self._fqns[index]}", state_dict)
            groups.append(own)
        state = {index: values for index, values in state.items() if values}
        self._optimizer.load_state_dict({**packed, "state": state, "param_groups": groups})

    def _parts(self) -> list[dict[str, Any]]:
        """Return the state of each parameter, and what steps added to its group, by key.

        A checkpoint has a part or not, but never half of it.
        """
        packed = self._optimizer.state_dict()
        parts = [(f"state.{self._fqns[index]}", own) for index, own in packed["state"].items()]
        for group in packed["param_groups"]:
            added = self._added(group)
            parts += [(f"param_groups.{self._fqns[index]}", added) for index in group["params"]]
        return [{f"{prefix}.{key}": v for key, v in own.items()} for prefix, own in parts if own]

    def _added(self, group: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in group.items() if key not in self._options}


def _init_state(optimizer: torch.optim.Optimizer) -> None:
    """Make missing state by a step with gradients and a learning rate of 0. Mutates the state."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if all(optimizer.state.get(parameter) for parameter in parameters):
        return
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _loaded(values: dict[str, Any], prefix: str, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return what ``state_dict`` has of ``values``, whose keys there begin with ``prefix``."""
    return {
        name: _like(value, state_dict[key])
        for name, value in values.items()
        if (key := f"{prefix}.{name}") in state_dict
    }


def _to_tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)


def _like(value: Any, tensor: torch.Tensor) -> Any:
    """``tensor`` as the type of ``value``, a tensor or a number."""
    return tensor if isinstance(value, torch.Tensor) else type(value)(tensor.item())
