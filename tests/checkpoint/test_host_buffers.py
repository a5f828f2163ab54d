"""Buffers of asynchronous saves share memory without overlapping, and waste little of it."""

import random

import pytest
import torch

from checkpoint import host_buffers
from checkpoint.host_buffers import ALIGNMENT, MAX_SLAB, allocate_like

MiB = 2**20


def is_power_of_two(number: int) -> bool:
    return number.bit_count() == 1


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the allocations, which take no memory before they are written."""
    sizes, allocate = list[int](), host_buffers._slab

    def slab(n_bytes: int, *, is_pinned: bool) -> torch.Tensor:
        assert not is_pinned, "no tensor is on a GPU"
        sizes.append(len(found := allocate(n_bytes, is_pinned=False)))
        return found

    monkeypatch.setattr(host_buffers, "_slab", slab)
    return sizes


def test_buffers_hold_what_is_copied_to_them(allocated: list[int]) -> None:
    draw = random.Random(0)
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn, torch.uint8)
    shapes = [(), (0,), (0, 7), (3,), (5, 7), (1, 2, 3, 4)]
    tensors = [
        torch.randint(0, 100, draw.choice(shapes)).to(draw.choice(dtypes)) for _ in range(200)
    ]
    buffers = allocate_like(tensors)
    for buffer, tensor in zip(buffers, tensors, strict=True):
        assert (buffer.shape, buffer.dtype) == (tensor.shape, tensor.dtype)
        buffer.copy_(tensor)
    # After all copies: none overwrote another.
    for buffer, tensor in zip(buffers, tensors, strict=True):
        assert torch.equal(buffer.double(), tensor.double())
    assert allocate_like([]) == []
    assert all(map(is_power_of_two, allocated))


def test_memory_is_what_the_tensors_need(
    allocated: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_buffers, "MAX_SLAB", 16 * MiB)
    # Each alone would take 1.5 times its memory, the largest 1.98 times.
    sizes = [33 * MiB, *([int(5.3 * MiB)] * 40), *([3000] * 100)]
    allocate_like([torch.empty(size, dtype=torch.uint8) for size in sizes])
    assert sum(allocated) < 1.1 * sum(sizes)
    assert all(map(is_power_of_two, allocated))
    assert MAX_SLAB % ALIGNMENT == 0
