"""Keep weights tied while modules get new parameters."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch.nn as nn


@contextmanager
def preserve_tied_weights(model: nn.Module) -> Iterator[None]:
    """On exit, tie the parameters again that were tied on entry. Mutates ``model``.

    ``parallelize_module`` and ``to_empty`` give every module a parameter of its own.
    """
    groups = fqns_by_parameter(model)
    yield
    for first, *others in groups:
        for fqn in others:
            path, _, name = fqn.rpartition(".")
            model.get_submodule(path).register_parameter(name, model.get_parameter(first))


def fqns_by_parameter(model: nn.Module) -> list[list[str]]:
    """Return all FQNs of each parameter."""
    fqns = defaultdict(list)
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        fqns[parameter].append(fqn)
    return list(fqns.values())
