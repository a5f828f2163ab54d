"""Runs operators on fake tensors, which have shapes and no data."""

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch

from runtime.compat import require

KEY = "--device"
FakeTensorMode: Any = require("torch._subclasses.fake_tensor:FakeTensorMode", key=KEY)
FakeTensor: Any = require("torch._subclasses.fake_tensor:FakeTensor", key=KEY)

# Operators that are remembered, of a kilobyte each.
MAX_KNOWN = 100_000


class Allocated(NamedTuple):
    """A new tensor that an operator returns."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Input(NamedTuple):
    """An input that an operator returns, such as what it changed in place."""

    number: int


class View(NamedTuple):
    """A view of the input number ``base`` that an operator returns."""

    base: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


Output = Allocated | Input | View | int | None


class FakeOperators:
    """Operators that remember what they return for inputs of the same shapes.

    PyTorch's own cache does so too, but a whole simulated step then takes 1.7 times as long.
    """

    def __init__(self) -> None:
        # Not a mode around others: DTensor would take it for its own.
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[Any, tuple[type, list[Output]]] = {}

    def __call__(self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> Any:
        """Return what ``func`` returns. ``inputs``: the fake tensors in ``args`` and ``kwargs``."""
        key = (func, *_described((args, tuple(kwargs.items()))))
        known = self._known.get(key)
        if known is not None:
            kind, outputs = known
            made = [self._made(each, inputs) for each in outputs]
            return made[0] if kind is torch.Tensor else kind(made)
        with self._mode:
            result = func(*args, **kwargs)
        described = _outputs_of(func, inputs, result)
        if described is not None:
            if len(self._known) == MAX_KNOWN:
                self._known.clear()
            self._known[key] = described
        return result

    def _made(self, output: Output, inputs: list[torch.Tensor]) -> torch.Tensor | int | None:
        if isinstance(output, Allocated):
            size, stride, dtype = output
            meta = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        elif isinstance(output, View):
            storage = inputs[output.base].untyped_storage()
            meta = torch.empty(0, dtype=output.dtype, device="meta")
            meta.set_(storage, output.offset, output.size, output.stride)
        elif isinstance(output, Input):
            return inputs[output.number]
        else:
            return output
        made: torch.Tensor = FakeTensor(self._mode, meta, torch.device("cpu"))
        return made


@cache
def fake_operators() -> FakeOperators:
    """Operators of all simulations of this process, which have most shapes in common."""
    return FakeOperators()


def _described(values: Any) -> Iterator[Any]:
    """Yield what decides on the outputs of an operator with arguments ``values``."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value.shape, value.stride(), value.storage_offset(), value.dtype
        elif isinstance(value, (tuple, list)):
            yield len(value)
            yield from _described(value)
        else:
            # As 1, 1.0 and True are equal.
            yield type(value), value


def _outputs_of(
    func: Any, inputs: list[torch.Tensor], result: Any
) -> tuple[type, list[Output]] | None:
    """Describe what ``func`` returned; None if it did more than that, or something unknown."""
    if func.namespace != "aten" or torch.Tag.inplace_view in func.tags:
        return None
    results = result if isinstance(result, (tuple, list)) else [result]
    outputs: list[Output] = []
    for each in results:
        if isinstance(each, torch.Tensor):
            bases = [n for n, tensor in enumerate(inputs) if _share_storage(each, tensor)]
            # Inputs that share a storage here may not share it elsewhere.
            if each.device.type != "cpu" or len(bases) > 1:
                return None
            outputs.append(_output(each, bases[0] if bases else None, inputs))
        elif each is None or isinstance(each, int):
            outputs.append(each)
        else:
            return None
    return type(result) if isinstance(result, (tuple, list)) else torch.Tensor, outputs


def _output(result: torch.Tensor, base: int | None, inputs: list[torch.Tensor]) -> Output:
    size, stride = result.shape, result.stride()
    if base is None:
        return Allocated(size, stride, result.dtype)
    if inputs[base] is result:
        return Input(base)
    return View(base, size, stride, int(result.storage_offset()), result.dtype)


def _share_storage(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.untyped_storage() is second.untyped_storage()
