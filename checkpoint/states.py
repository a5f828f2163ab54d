"""State of the model and the optimizer, keyed by FQN so that it loads on any mesh."""

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)


class ModelState:
    """``Stateful`` for a model's parameters and persistent buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self._model)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_model_state_dict(self._model, state_dict)


class OptimizerState:
    """``Stateful`` with flat keys (``state.<FQN>.exp_avg``): pipeline stages never collide.

    Tensors only: on resume, the learning rate and other options come from the configuration.
    Numbers in the state, and those that steps add to parameter groups, are saved as tensors.
    """

    _flags = StateDictOptions(flatten_optimizer_state_dict=True)

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer`` has made no step yet."""
        self._both = model, optimizer
        self._options = {key for group in optimizer.param_groups for key in group}

    def state_dict(self) -> dict[str, Any]:
        return {key: _to_tensor(v) for key, v in self._flat().items() if self._is_state(key)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        flat = self._flat()
        loaded = {key: _like(flat[key], tensor) for key, tensor in state_dict.items()}
        set_optimizer_state_dict(*self._both, flat | loaded, options=self._flags)

    def _is_state(self, key: str) -> bool:
        return key.startswith("state.") or key.rpartition(".")[2] not in self._options

    def _flat(self) -> dict[str, Any]:
        return get_optimizer_state_dict(*self._both, options=self._flags)


def _to_tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)


def _like(value: Any, tensor: torch.Tensor) -> Any:
    """``tensor`` as the type of ``value``, a tensor or a number."""
    return tensor if isinstance(value, torch.Tensor) else type(value)(tensor.item())
