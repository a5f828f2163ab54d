"""Tied weights stay tied while modules get new parameters."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch.nn as nn


@contextmanager
def keep_shared(model: nn.Module) -> Iterator[None]:
    """Tie again, afterwards, the parameters that were shared before.

    ``parallelize_module`` and ``to_empty`` give every module a parameter of its own.
    """
    names = _names(model)
    yield
    for first, *others in names:
        for fqn in others:
            path, _, name = fqn.rpartition(".")
            model.get_submodule(path).register_parameter(name, model.get_parameter(first))


def shared_names(model: nn.Module) -> list[str]:
    """The first name of each parameter that has several."""
    return [first for first, *others in _names(model) if others]


def _names(model: nn.Module) -> list[list[str]]:
    """All names of each parameter."""
    names = defaultdict(list)
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(fqn)
    return list(names.values())
