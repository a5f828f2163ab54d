"""Operators on fake tensors return from memory what they returned before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from planner.fake_operators import FakeOperators

aten = torch.ops.aten


def make(fake: FakeOperators, *size: int) -> torch.Tensor:
    """Tensor of its own storage, strided and with an offset."""
    whole = fake(aten.empty.memory_format, ([2, *size],), {}, [])
    part: torch.Tensor = fake(aten.select.int, (whole, 0, 1), {}, [whole])
    return part


def facts(result: Any, inputs: list[torch.Tensor]) -> list[Any]:
    """Everything that callers can tell about tensors without data."""
    return [
        (
            t.shape,
            t.stride(),
            t.storage_offset(),
            t.dtype,
            t.device,
            [t.untyped_storage() is each.untyped_storage() for each in inputs],
            [t is each for each in inputs],
        )
        if isinstance(t, torch.Tensor)
        else t
        for t in (result if isinstance(result, (tuple, list)) else [result])
    ]


CASES: list[Callable[[torch.Tensor, torch.Tensor], tuple[Any, ...]]] = [
    lambda x, y: (aten.mm.default, (x, y), {}),
    lambda x, y: (aten.t.default, (x,), {}),
    lambda x, y: (aten.view.default, (x, [8, 2]), {}),
    lambda x, y: (aten.unbind.int, (x,), {}),
    lambda x, y: (aten.as_strided.default, (x, [2, 2], [1, 2], 5), {}),
    lambda x, y: (aten.add_.Tensor, (x, y), {}),
    lambda x, y: (aten.add_.Tensor, (x, x), {}),
    lambda x, y: (aten.mul.out, (x, y), {"out": y}),
    lambda x, y: (aten.mul.out, (x, y), {"out": x}),
    lambda x, y: (aten._foreach_add_.List, ([x], [y]), {}),
    lambda x, y: (aten.topk.default, (x, 2), {}),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("before", [None, *CASES[5:9]])
def test_remembered_results_are_those_of_pytorch(case: Any, before: Any) -> None:
    """Also if the operator was seen ``before`` with other inputs that share storages."""
    found = []
    for n_times in (1, 3):
        fake = FakeOperators()
        for each in filter(None, [before] * (n_times > 1) + [case] * n_times):
            x, y = make(fake, 4, 4), make(fake, 4, 4)
            func, args, kwargs = each(x, y)
            flat = [t for arg in args for t in (arg if isinstance(arg, list) else [arg])]
            inputs = [t for t in (*flat, *kwargs.values()) if isinstance(t, torch.Tensor)]
            result = fake(func, args, kwargs, inputs)
        found.append(facts(result, inputs))
    assert found[0] == found[1]


def test_in_place_change_of_the_shape_happens_each_time() -> None:
    fake = FakeOperators()
    for _ in range(2):
        x = make(fake, 4, 2)
        assert fake(aten.t_.default, (x,), {}, [x]) is x
        assert x.shape == (2, 4)
