"""Modules whose parameters read as transformed weights during forward: gathered, cast, or both."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch
import torch.nn as nn

from parallelisms.tied_weights import common_module, fqns_by_parameter

Transform = Callable[[torch.Tensor], torch.Tensor]


def apply_parametrization(model: nn.Module, transforms: Mapping[nn.Parameter, Transform]) -> None:
    """Make parameters read as their ``transforms`` during a module's forward. Mutates ``model``.

    ``transforms`` has an entry for each parameter. Names and parameters stay.
    """
    parametrizations: dict[nn.Module, list[_Parametrization]] = defaultdict(list)
    for fqns in fqns_by_parameter(model):
        # A weight that several modules share is transformed once. Not by the whole model if a part
        # of it has all of them, because backward may recompute that part.
        path = common_module(model, fqns)
        below = [fqn.removeprefix(f"{path}.").rpartition(".") for fqn in fqns]
        sites = tuple((site, name) for site, _, name in below)
        transform = transforms[model.get_parameter(fqns[0])]
        parametrizations[model.get_submodule(path)].append(_Parametrization(sites, transform))
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
