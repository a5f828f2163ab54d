"""Gradient norm that is bitwise identical however the gradients are sharded.

A floating-point sum depends on its order, and sharding changes the order. An integer sum does not:
squares are split into fixed-point levels, and each level is summed in int64.
"""

from collections.abc import Iterator, Mapping
from itertools import chain

import torch
import torch.distributed as dist

from runtime.compat import foreach

# This rank's tensors, by the process groups over which their gradients are sharded.
TensorsByGroups = Mapping[tuple[dist.ProcessGroup, ...], list[torch.Tensor]]
LEVELS = 3
# Bounds the elements held in float64 and int64 at once.
CHUNK = 2**18


def exact_norm(shards: TensorsByGroups, n_elements: int) -> torch.Tensor:
    """Return the 2-norm of all gradients, 0-d float64, equal on all ranks. Collective.

    ``n_elements``: number of elements of the unsharded gradients, which keeps every sum from
    overflowing. The norm is infinite if any gradient is not finite. Never waits for the device.

    The error of the squared norm is less than 1e-15 from rounding, plus n**4 / 2**183 from
    truncation of the last level.
    """
    largest = _largest(shards)
    scale = torch.where(largest > 0, largest, 1.0)
    # Bits per level, few enough that a sum of n_elements stays below 2**62.
    bits = 62 - n_elements.bit_length()
    totals = []
    for groups, local in shards.items():
        sums = torch.zeros(LEVELS, dtype=torch.int64, device=largest.device)
        for values in _chunks(local):
            sums += _level_sums(values, scale, bits)
        for group in groups:
            dist.all_reduce(sums, group=group)
        totals.append(sums)
    square = torch.zeros_like(largest)
    for level in torch.stack(totals).sum(dim=0).flip(0):
        square = (square + level) * 2.0**-bits
    return torch.where(largest.isfinite(), scale * square.sqrt(), largest)


def _largest(shards: TensorsByGroups) -> torch.Tensor:
    """Largest absolute value on any rank, 0-d float64; infinite if a value is not finite."""
    found = []
    for groups, local in shards.items():
        largest = torch.zeros((), dtype=torch.float64, device=local[0].device)
        # A rank's shard of a small gradient may be empty.
        if nonempty := [tensor for tensor in local if tensor.numel() > 0]:
            largest = torch.stack(foreach("norm", nonempty, torch.inf)).amax().double()
        # Backends differ in whether an all-reduce MAX propagates NaN.
        largest = torch.where(largest.isfinite(), largest, torch.inf)
        for group in groups:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        found.append(largest)
    return torch.stack(found).amax()


def _chunks(tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield all elements in 1-D chunks of ``CHUNK`` to 2 * ``CHUNK``; the last may be smaller."""
    chunk: list[torch.Tensor] = []
    count = 0
    for segment in chain.from_iterable(tensor.flatten().split(CHUNK) for tensor in tensors):
        chunk.append(segment)
        count += segment.numel()
        if count >= CHUNK:
            yield torch.cat(chunk)
            chunk, count = [], 0
    if chunk:
        yield torch.cat(chunk)


def _level_sums(values: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
    """Sum (values / scale) ** 2, each at most 1, per fixed-point level: (LEVELS,) int64."""
    remainder = (values.double() / scale).square_()
    sums = []
    for _ in range(LEVELS):
        # Exact: multiplication by a power of two, then the whole and fractional parts.
        remainder *= 2.0**bits
        whole = remainder.floor()
        remainder -= whole
        sums.append(whole.sum(dtype=torch.int64))
    return torch.stack(sums)
