"""Runs operators on fake tensors, which have shapes and no data."""

from collections.abc import Iterator
from typing import Any

import torch

from runtime.compat import require

KEY = "--device"
FakeTensorMode: Any = require("torch._subclasses.fake_tensor:FakeTensorMode", key=KEY)
FakeTensor: Any = require("torch._subclasses.fake_tensor:FakeTensor", key=KEY)

# What an operator returned: the size, stride and dtype of each new tensor, or another value.
Outputs = list[tuple[torch.Size, tuple[int, ...], torch.dtype] | int | None]


class FakeOperators:
    """Operators that remember what they allocate for inputs of the same shapes.

    PyTorch's own cache does so too, but a whole simulated step then takes 1.6 times as long.
    """

    def __init__(self) -> None:
        # Not a mode around others: DTensor would propagate whole shapes in it, seen as local.
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[Any, tuple[type, Outputs] | None] = {}

    def __call__(self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> Any:
        """Return what ``func`` returns. ``inputs``: the fake tensors in ``args`` and ``kwargs``."""
        key = (func, *_described((args, tuple(kwargs.items()))))
        known = self._known.get(key)
        if known is not None:
            kind, outputs = known
            made = [self._made(*each) if isinstance(each, tuple) else each for each in outputs]
            return made[0] if kind is torch.Tensor else kind(made)
        with self._mode:
            result = func(*args, **kwargs)
        if key not in self._known:
            self._known[key] = _allocated(func, inputs, result)
        return result

    def _made(self, size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        meta = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        made: torch.Tensor = FakeTensor(self._mode, meta, torch.device("cpu"))
        return made


def _described(values: Any) -> Iterator[Any]:
    """Yield what decides on the outputs of an operator with arguments ``values``."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value.shape, value.stride(), value.dtype
        elif isinstance(value, (tuple, list)):
            yield len(value)
            yield from _described(value)
        else:
            # As 1, 1.0 and True are equal.
            yield type(value), value


def _allocated(func: Any, inputs: list[torch.Tensor], result: Any) -> tuple[type, Outputs] | None:
    """Return what ``func`` allocated; None if it may have returned an input or a view of one."""
    if func.namespace != "aten":
        return None
    results = result if isinstance(result, (tuple, list)) else [result]
    storages = {id(tensor.untyped_storage()) for tensor in inputs}
    outputs: Outputs = []
    for each in results:
        if isinstance(each, torch.Tensor):
            if id(each.untyped_storage()) in storages or each.device.type != "cpu":
                return None
            outputs.append((each.shape, each.stride(), each.dtype))
        elif each is None or isinstance(each, int):
            outputs.append(each)
        else:
            return None
    return type(result) if isinstance(result, (tuple, list)) else torch.Tensor, outputs
