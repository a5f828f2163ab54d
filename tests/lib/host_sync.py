"""Context in which the host must not wait for the device."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch


def _raise_on_host_sync(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("the host waits for the device")


@contextmanager
def forbid_host_sync() -> Iterator[None]:
    with ExitStack() as stack:
        for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy"):
            stack.enter_context(patch.object(torch.Tensor, name, _raise_on_host_sync))
        yield
