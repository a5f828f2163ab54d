"""Tied weights stay tied while modules get new parameters."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch.nn as nn


@contextmanager
def keep_shared(model: nn.Module) -> Iterator[None]:
    """Share again, afterwards, the parameters that were one before.

    ``parallelize_module`` and ``to_empty`` give every module a parameter of its own.
    """
    names = defaultdict(list)
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(fqn)
    yield
    for first, *others in names.values():
        for fqn in others:
            path, _, name = fqn.rpartition(".")
            model.get_submodule(path).register_parameter(name, model.get_parameter(first))
