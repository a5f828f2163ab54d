"""Modules whose parameters read as transformed weights during forward: gathered, cast, or both."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch
import torch.nn as nn

Transform = Callable[[torch.Tensor], torch.Tensor]


def apply_parametrization(model: nn.Module, transforms: Mapping[nn.Parameter, Transform]) -> None:
    """Make parameters read as their ``transforms`` during a module's forward. Mutates ``model``.

    ``transforms`` has an entry for each parameter. Names and parameters stay.
    """
    sites_of: dict[nn.Parameter, list[tuple[str, str]]] = defaultdict(list)
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        path, _, name = fqn.rpartition(".")
        sites_of[parameter].append((path, name))
    parametrizations: dict[nn.Module, list[_Parametrization]] = defaultdict(list)
    for parameter, sites in sites_of.items():
        owner = model
        if len(sites) == 1:
            ((path, name),) = sites
            owner, sites = model.get_submodule(path), [("", name)]
        # A weight that several modules share is transformed once, in the model's own forward.
        parametrizations[owner].append(_Parametrization(tuple(sites), transforms[parameter]))
    for module in model.modules():
        names = tuple(name for name, _ in module.named_parameters(recurse=False))
        if names or module in parametrizations:
            module.__class__ = _parametrized_class(cast(Any, type(module)), names)
            mixed = cast(_ParametrizedModule, module)
            mixed._parametrizations, mixed._transformed = parametrizations[module], {}


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Compute in ``dtype``; gradients keep the dtype of the parameters. Mutates ``model``."""

    def to_dtype(parameter: torch.Tensor) -> torch.Tensor:
        return parameter.to(dtype)

    apply_parametrization(model, dict.fromkeys(model.parameters(), to_dtype))


@dataclass(frozen=True)
class _Parametrization:
    """Transform of one parameter, by the module that owns it."""

    sites: tuple[tuple[str, str], ...]
    """(path below the owner, attribute name) of every module that shares the parameter."""
    transform: Transform

    def apply(self, owner: nn.Module) -> None:
        sites = [
            (cast(_ParametrizedModule, owner.get_submodule(path)), name)
            for path, name in self.sites
        ]
        first, name = sites[0]
        transformed = self.transform(first.get_parameter(name))
        for module, name in sites:
            module._transformed[name] = transformed

    def remove(self, owner: nn.Module) -> None:
        for path, name in self.sites:
            # A forward that failed, or recomputation that stopped early, may not have applied it.
            cast(_ParametrizedModule, owner.get_submodule(path))._transformed.pop(name, None)


class _ParametrizedModule(nn.Module):
    """Mixin that applies parametrizations while the module's forward runs.

    Hooks have different ids, so they would make torch.compile compile every block again.
    """

    _parametrizations: list[_Parametrization]
    _transformed: dict[str, torch.Tensor]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            for parametrization in self._parametrizations:
                parametrization.apply(self)
            return super().forward(*args, **kwargs)
        finally:
            for parametrization in self._parametrizations:
                parametrization.remove(self)


@cache
def _parametrized_class(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Return a subclass of ``cls`` whose named parameters read as transformed, where they are."""
    properties = {name: property(partial(_transformed_or_raw, name=name)) for name in names}
    return type(f"Parametrized{cls.__name__}", (_ParametrizedModule, cls), properties)


def _transformed_or_raw(module: _ParametrizedModule, name: str) -> torch.Tensor | None:
    if name in module._transformed:
        return module._transformed[name]
    # Bypass this property.
    return cast(torch.Tensor | None, nn.Module.__getattr__(module, name))
