"""Stands in for CUDA graphs on CPUs: repeats recorded operations on the storages they used.

What a graph would freeze has its effect here too: a number that was a Python value, the address of
a tensor that is made again in each step, a collective that was skipped.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

Call = tuple[Any, tuple[Any, ...], dict[str, Any], list[Any]]


class OpRecorder:
    """A ``GraphPool`` of cuda_graphs.py."""

    n_bytes = 0

    def __init__(self) -> None:
        self.n_captured = 0
        self._tapes: list[_Tape] = []

    def warm_up(self, function: Callable[[], Any]) -> Any:
        return function()

    def capture(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        with _Tape() as tape:
            result = function()
        tape.undo()
        self.n_captured += len(tape.calls)
        self._tapes.append(tape)

        def replay() -> None:
            assert tape in self._tapes, "the graph was freed"
            _replay(tape.calls)

        return result, replay

    def reset(self) -> None:
        self._tapes.clear()

    @property
    def n_live(self) -> int:
        """Graphs that hold memory."""
        return len(self._tapes)


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._own: set[int] = set()
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def undo(self) -> None:
        """Give back what was there before to all that was changed: a capture computes nothing."""
        for storage, before in self._before.values():
            if storage.size() == before.size():
                storage.copy_(before)

    def _save(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep what ``func`` is about to change, unless it was made since the tape began."""
        by_name = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}
        written = {a.name for a in func._schema.arguments if a.is_write or func.namespace == "c10d"}
        values = [value for name, value in (by_name | kwargs).items() if name in written]
        for tensor in filter(_is_tensor, tree_leaves(values)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._own | self._before.keys():
                self._before[storage._cdata] = storage, storage.clone()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Operations on the tensors that DTensors and float8 weights wrap come here next.
        if set(types) - {torch.Tensor, nn.Parameter}:
            return NotImplemented
        self._save(func, args, kwargs or {})
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)}
        result = func(*args, **(kwargs or {}))
        self._own |= {_storage(t) for t in tree_leaves(result) if _is_tensor(t)} - given
        if func.namespace != "profiler":
            self.calls.append((func, args, kwargs or {}, tree_leaves(result)))
            _wait(func, tree_leaves(result))
        return result


@torch.no_grad()
def _replay(calls: list[Call]) -> None:
    for func, args, kwargs, results in calls:
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)}
        again = tree_leaves(func(*args, **kwargs))
        _wait(func, again)
        for result, value in zip(results, again, strict=True):
            # Views and arguments already have the new values.
            if _is_tensor(result) and _storage(result) not in given:
                result.copy_(value)


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _wait(func: Any, results: list[Any]) -> None:
    """Wait for a collective. A graph's other operations wait on the device."""
    for result in results:
        if isinstance(result, torch.ScriptObject):
            dist.Work.unbox(result).wait()
        elif func.namespace == "_c10d_functional":
            torch.ops._c10d_functional.wait_tensor(result)


@contextmanager
def as_on_devices() -> Iterator[None]:
    """Keep storages that FSDP2 frees, as a graph's pool does; record nothing of gloo's waits."""
    resize, wait = torch.UntypedStorage.resize_, dist.Work.wait

    def resize_up(self: torch.UntypedStorage, size: int) -> Any:
        return resize(self, size) if size > self.size() else None

    def wait_alone(self: dist.Work, *args: Any) -> bool:
        with _disable_current_modes():
            return wait(self, *args)

    with (
        patch.object(torch.UntypedStorage, "resize_", resize_up),
        patch.object(dist.Work, "wait", wait_alone),
    ):
        yield
