"""A gradient norm that is the same bit for bit however the gradients are sharded.

A sum of floating-point numbers depends on their order, and sharding changes the order. A sum of
integers does not: squares are cut into fixed-point levels, and each level is summed in int64.
"""

from collections.abc import Iterator, Mapping
from itertools import chain

import torch
import torch.distributed as dist

from runtime.compat import foreach

# This rank's parts of the gradients, by the process groups over which they are sharded.
Shards = Mapping[tuple[dist.ProcessGroup, ...], list[torch.Tensor]]
LEVELS = 3
# Bounds how many elements are in float64 and int64 at a time.
CHUNK = 2**18


def exact_norm(shards: Shards, n_elements: int) -> torch.Tensor:
    """The 2-norm of all gradients, a float64 scalar, equal on all ranks.

    ``n_elements``: of the unsharded gradients, so that no sum can overflow. Infinite if any
    gradient is not finite. No host synchronization.

    The square is off by less than 1e-15 for rounding, and by less than n**4 / 2**183 for what the
    last level cuts off.
    """
    largest = _largest(shards)
    scale = torch.where(largest > 0, largest, 1.0)
    # Bits of a level: so few that the sum of n_elements of them stays below 2**62.
    bits = 62 - n_elements.bit_length()
    totals = []
    for groups, local in shards.items():
        sums = torch.zeros(LEVELS, dtype=torch.int64, device=largest.device)
        for values in _chunks(local):
            sums += _squares(values, scale, bits)
        for group in groups:
            dist.all_reduce(sums, group=group)
        totals.append(sums)
    square = torch.zeros_like(largest)
    for level in torch.stack(totals).sum(dim=0).flip(0):
        square = (square + level) * 2.0**-bits
    return torch.where(largest.isfinite(), scale * square.sqrt(), largest)


def _largest(shards: Shards) -> torch.Tensor:
    """The largest magnitude of all, a float64 scalar; infinite if one is not finite."""
    found = []
    for groups, local in shards.items():
        largest = torch.zeros((), dtype=torch.float64, device=local[0].device)
        # A rank may have nothing of a small gradient.
        if parts := [tensor for tensor in local if tensor.numel() > 0]:
            largest = torch.stack(foreach("norm", parts, torch.inf)).amax().double()
        # Whether a maximum keeps a NaN is up to the backend.
        largest = torch.where(largest.isfinite(), largest, torch.inf)
        for group in groups:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        found.append(largest)
    return torch.stack(found).amax()


def _chunks(tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """All elements, 1-D, but for the last between one and two times ``CHUNK`` at once."""
    pieces: list[torch.Tensor] = []
    count = 0
    for piece in chain.from_iterable(tensor.flatten().split(CHUNK) for tensor in tensors):
        pieces.append(piece)
        count += piece.numel()
        if count >= CHUNK:
            yield torch.cat(pieces)
            pieces, count = [], 0
    if pieces:
        yield torch.cat(pieces)


def _squares(values: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
    """The sums of the squares of values / scale, at most 1, in each of the levels (LEVELS,)."""
    rest = (values.double() / scale).square_()
    sums = []
    for _ in range(LEVELS):
        # Exact: a power of two, then the whole part and what is left of it.
        rest *= 2.0**bits
        whole = rest.floor()
        rest -= whole
        sums.append(whole.sum(dtype=torch.int64))
    return torch.stack(sums)
