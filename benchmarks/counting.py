"""Memory and communication of one training step, counted from PyTorch's profiler.

Works for eager and compiled code, because the allocator and the collectives emit the events.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from parallelisms.parallel_dims import Degrees
from runtime.dtensor import to_local

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
    """Memory and communication of one rank in one step; in bytes, except ``calls``."""

    parameters: int
    gradients: int
    optimizer: int
    rest: int
    """Activations, gathered weights and buffers."""
    calls: dict[str, int]
    sent: dict[str, float]
    """Bytes by collective, with ring algorithms."""
    allocator: int | None
    """Peak by the statistics of CUDA's allocator; None on CPU."""

    @property
    def peak(self) -> int:
        return sum(getattr(self, kind) for kind in MEMORY)


def profiled(step: Callable[[], object]) -> list[Any]:
    """Profile ``step``; return its events in order: allocations, operations and ``mark`` points."""
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


def mark(name: str) -> None:
    """Record a named point in the profile."""
    with record_function(name):
        pass


@dataclass
class Block:
    """A live memory allocation."""

    size: int
    is_of_backward: bool
    is_gradient: bool = False


def count_memory(events: list[Any], device: torch.device) -> tuple[int, int]:
    """Peak bytes that a step allocates beyond its start: (gradients, rest).

    A gradient is memory that backward allocates and does not free. Requires the marks "forward
    begins", "forward ends" and "backward ends", and a process group whose threads free no memory,
    unlike gloo's.
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
        address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        if size > 0:
            assert address not in live, "a free is missing in the profile"
            live[address] = Block(size, in_backward)
            held += size
        elif address in live:
            held -= live.pop(address).size
        if held > peak:
            peak, at_peak = held, list(live.values())
    gradients = sum(block.size for block in at_peak if block.is_gradient)
    return gradients, peak - gradients


def count_collectives(
    events: list[Any], degrees: Degrees
) -> tuple[dict[str, int], dict[str, float]]:
    """Count the calls of each collective and the bytes that a rank sends with ring algorithms.

    All-reduces of scalars, for the gradient norm, are counted separately as "scalar".
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
            # The profiler omits the list of outputs.
            bytes_sent = (degrees.dp_shard - 1) * second
        else:
            # One operand is the full tensor, the other this rank's shard.
            bytes_sent = abs(first - second)
        calls[kind] += 1
        sent[kind] += bytes_sent
    return calls, sent


def operand_bytes(operand: Any) -> int:
    if isinstance(operand, list):
        return sum(operand_bytes(tensor) for tensor in operand)
    return math.prod(operand.sizes) * operand.dtype.itemsize if hasattr(operand, "sizes") else 0


def held_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of this rank's shards of ``tensors``; a shared storage counts once."""
    storages = [to_local(tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
