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
    """

    _options = StateDictOptions(flatten_optimizer_state_dict=True)

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._both = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in self._flat().items() if key.startswith("state.")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_optimizer_state_dict(*self._both, self._flat() | state_dict, options=self._options)

    def _flat(self) -> dict[str, Any]:
        return get_optimizer_state_dict(*self._both, options=self._options)
