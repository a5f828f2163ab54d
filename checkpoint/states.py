"""What a checkpoint holds of the model and the optimizer, by FQN, so that it loads on any mesh."""

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
    def __init__(self, parts: list[nn.Module]) -> None:
        self._parts = parts

    def state_dict(self) -> dict[str, Any]:
        return {fqn: t for part in self._parts for fqn, t in get_model_state_dict(part).items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part in self._parts:
            set_model_state_dict(part, {fqn: state_dict[fqn] for fqn in get_model_state_dict(part)})


class OptimizerState:
    """Keys are flat (``state.<FQN>.exp_avg``), so pipeline stages and layouts never collide.

    Only tensors: learning rates and other options are the configuration's to say, also on resume.
    """

    _options = StateDictOptions(flatten_optimizer_state_dict=True)

    def __init__(self, parts: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
        self._pairs = list(zip(parts, optimizers, strict=True))

    def state_dict(self) -> dict[str, Any]:
        return {
            key: value
            for part, optimizer in self._pairs
            for key, value in self._flat(part, optimizer).items()
            if key.startswith("state.")
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, optimizer in self._pairs:
            flat = self._flat(part, optimizer) | state_dict
            set_optimizer_state_dict(part, optimizer, flat, options=self._options)

    def _flat(self, part: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return get_optimizer_state_dict(part, optimizer, options=self._options)
