"""Modules whose forward reads weights made of their parameters: gathered, cast, or both."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch
import torch.nn as nn

Make = Callable[[torch.Tensor], torch.Tensor]


def apply_weights_in_forward(model: nn.Module, makers: Mapping[nn.Parameter, Make]) -> None:
    """While a module runs, and only then, its parameters read as what ``makers`` make of them.

    Mutates ``model``, whose parameters ``makers`` has; names and parameters stay.
    """
    places: dict[nn.Parameter, list[tuple[str, str]]] = defaultdict(list)
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        path, _, name = fqn.rpartition(".")
        places[parameter].append((path, name))
    weights: dict[nn.Module, list[_Weight]] = defaultdict(list)
    for parameter, shared in places.items():
        owner = model
        if len(shared) == 1:
            ((path, name),) = shared
            owner, shared = model.get_submodule(path), [("", name)]
        # What several modules share is made once, while the whole model runs.
        weights[owner].append(_Weight(tuple(shared), makers[parameter]))
    for module in model.modules():
        names = tuple(name for name, _ in module.named_parameters(recurse=False))
        if names or module in weights:
            module.__class__ = _making(cast(Any, type(module)), names)
            making = cast(_Making, module)
            making._weights, making._made = weights[module], {}


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Have ``model`` compute in ``dtype``; gradients have that of the parameters."""

    def to_dtype(parameter: torch.Tensor) -> torch.Tensor:
        return parameter.to(dtype)

    apply_weights_in_forward(model, dict.fromkeys(model.parameters(), to_dtype))


@dataclass(frozen=True)
class _Weight:
    places: tuple[tuple[str, str], ...]
    """Submodules that have it, by their paths below the one that makes it, and its names there."""
    make: Make

    def show(self, owner: nn.Module) -> None:
        places = [(cast(_Making, owner.get_submodule(path)), name) for path, name in self.places]
        first, name = places[0]
        made = self.make(first.get_parameter(name))
        for place, name in places:
            place._made[name] = made

    def hide(self, owner: nn.Module) -> None:
        for path, name in self.places:
            # A forward that failed, or recomputation that stopped early, may not have come so far.
            cast(_Making, owner.get_submodule(path))._made.pop(name, None)


class _Making(nn.Module):
    """Mixed into a module's class: while its forward runs, weights are made.

    A class and not hooks: the ids of hooks differ, so every block would be compiled anew.
    """

    _weights: list[_Weight]
    _made: dict[str, torch.Tensor]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            for weight in self._weights:
                weight.show(self)
            return super().forward(*args, **kwargs)
        finally:
            for weight in self._weights:
                weight.hide(self)


@cache
def _making(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """``cls``, whose parameters of these names are what was made of them, if anything was."""
    properties = {name: property(partial(_made_or_parameter, name=name)) for name in names}
    return type(f"WeightsInForward{cls.__name__}", (_Making, cls), properties)


def _made_or_parameter(module: _Making, name: str) -> torch.Tensor | None:
    if name in module._made:
        return module._made[name]
    # Past this very property.
    return cast(torch.Tensor | None, nn.Module.__getattr__(module, name))
