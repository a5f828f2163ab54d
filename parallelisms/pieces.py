"""Methods of a block that are wrapped one by one, where the whole block cannot be."""

from collections.abc import Callable
from typing import Any

import torch.nn as nn


def wrap_piece(
    block: nn.Module, path: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Put ``wrap(method)`` in place of the method of that dotted ``path``. Mutates ``block``."""
    owner, _, name = path.rpartition(".")
    module = block.get_submodule(owner)
    setattr(module, name, wrap(getattr(module, name)))
