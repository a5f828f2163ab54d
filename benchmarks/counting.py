"""What one training step allocates and sends, counted from PyTorch's profiler.

Works for eager and compiled code: the allocator and the collectives report from below both.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from parallelisms.parallel_dims import Degrees
from runtime.distributed import local_part

MEMORY = ("parameters", "gradients", "optimizer", "rest")
COLLECTIVES = {
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_": "all_gather",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
}


@dataclass
class Counts:
    """What one rank holds and sends in one step; in bytes, but for ``calls``."""

    parameters: int
    gradients: int
    optimizer: int
    rest: int
    """Activations, gathered weights and buffers."""
    calls: dict[str, int]
    sent: dict[str, float]
    """By collective, with ring algorithms."""
    allocator: int | None
    """The peak by CUDA's own statistics."""

    @property
    def peak(self) -> int:
        return sum(getattr(self, kind) for kind in MEMORY)


def profiled(step: Callable[[], object]) -> list[Any]:
    """What happened in a step, in order: allocations, operations, and the points of ``mark``."""
    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, profile_memory=True, record_shapes=True) as result:
        step()
    assert result.profiler is not None
    assert result.profiler.kineto_results is not None
    events, found = list(result.profiler.kineto_results.experimental_event_tree()), []
    while events:
        event = events.pop()
        found.append(event)
        events.extend(event.children)
    return sorted(found, key=lambda event: event.start_time_ns)


def mark(what: str) -> None:
    """Put a named point into a profile."""
    with record_function(what):
        pass


@dataclass
class Block:
    """Memory that somebody allocated."""

    size: int
    is_of_backward: bool
    is_gradient: bool = False


def count_memory(events: list[Any], device: torch.device) -> tuple[int, int]:
    """The most bytes that a step held beyond what it began with: gradients, and the rest.

    A gradient is what backward allocates and leaves behind. Needs the marks "forward begins",
    "forward ends" and "backward ends", and a group whose threads free nothing, unlike gloo's.
    """
    live: dict[int, Block] = {}
    at_peak: list[Block] = []
    held = peak = 0
    in_backward = False
    for event in events:
        if event.name in ("forward begins", "backward ends"):
            in_backward = False
            for block in live.values():
                block.is_gradient |= block.is_of_backward
        elif event.name == "forward ends":
            in_backward = True
        if event.tag.name != "Allocation" or event.extra_fields.device.type != device.type:
            continue
        where, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        if size > 0:
            assert where not in live, "something was freed and not seen"
            live[where] = Block(size, in_backward)
            held += size
        elif where in live:
            held -= live.pop(where).size
        if held > peak:
            peak, at_peak = held, list(live.values())
    gradients = sum(block.size for block in at_peak if block.is_gradient)
    return gradients, peak - gradients


def count_collectives(
    events: list[Any], degrees: Degrees
) -> tuple[dict[str, int], dict[str, float]]:
    """Calls of each collective, and the bytes that a rank sends in them with ring algorithms.

    All-reduces of scalars, for the gradient norm, are counted apart, as "scalar".
    """
    calls = dict.fromkeys(["all_gather", "reduce_scatter", "all_reduce", "scalar"], 0)
    sent = dict.fromkeys(calls, 0.0)
    for event in events:
        if not event.name.startswith("c10d::"):
            continue
        kind = COLLECTIVES[event.name]
        first, second = (operand_bytes(operand) for operand in event.extra_fields.inputs[:2])
        if kind == "all_reduce":
            bytes_sent = 2 * (1 - 1 / degrees.dp_replicate) * first
            kind = kind if first > 8 else "scalar"
        elif event.name == "c10d::allgather_":
            # The profiler leaves out the list of outputs.
            bytes_sent = (degrees.dp_shard - 1) * second
        else:
            # One operand is the whole, the other this rank's part of it.
            bytes_sent = abs(first - second)
        calls[kind] += 1
        sent[kind] += bytes_sent
    return calls, sent


def operand_bytes(operand: Any) -> int:
    if isinstance(operand, list):
        return sum(operand_bytes(tensor) for tensor in operand)
    return math.prod(operand.sizes) * operand.dtype.itemsize if hasattr(operand, "sizes") else 0


def held_bytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = [local_part(tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
