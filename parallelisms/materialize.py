"""Memory and weights for a sharded model: the same weights on any mesh, bit for bit.

Every element is a counter-based function of (seed, canonical FQN, global index). Each rank computes
its own slice: no communication, no RNG state. DTensor's random ops are not an alternative: on CPU
they silently give every shard the same values.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from parallelisms.shared_parameters import keep_shared
from runtime.distributed import local_part
from runtime.shards import part_of

# Elements made at once. Their float64 and int64 temporaries are about five times as many, and on
# a CPU should stay in its cache: that is 3.5 times as fast.
BLOCK_ELEMENTS, CPU_BLOCK_ELEMENTS = 1 << 22, 1 << 17


def materialize(
    model: nn.Module, device: torch.device, *, seed: int, is_offloaded: bool = False
) -> None:
    """Allocate the shards on ``device`` and let ``model.init_weights`` fill them, in place.

    ``is_offloaded``: parameters live in host memory, and only buffers on ``device``.
    """
    with keep_shared(model):
        model.to_empty(device=torch.device("cpu") if is_offloaded else device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    with torch.no_grad():
        for tensor in tensors.values():
            if tensor.is_floating_point():
                local_part(tensor).fill_(torch.nan)
    fqns = {id(tensor): fqn for fqn, tensor in tensors.items()}

    def trunc_normal_(parameter: torch.Tensor, *, std: float) -> None:
        fill_trunc_normal(parameter, std=std, key=_key(seed, fqns[id(parameter)]))

    cast(Callable, model.init_weights)(trunc_normal_)
    missed = [
        fqn for fqn, t in tensors.items() if t.is_floating_point() and local_part(t).isnan().any()
    ]
    assert not missed, f"init_weights does not fill {missed}"


@torch.no_grad()
def fill_trunc_normal(parameter: torch.Tensor, *, std: float, key: int) -> None:
    """Write a normal of mean 0, cut at 3 ``std``, into this rank's part of ``parameter``.

    By the inverse of the cumulative distribution: one pass, no rejection, so no rank waits.
    """
    local = local_part(parameter)
    if local.numel() == 0:
        return
    rows, *others = _global_indices(parameter)
    strides = [math.prod(parameter.shape[dim + 1 :]) for dim in range(parameter.ndim)]
    within_row = torch.zeros((), dtype=torch.int64, device=local.device)
    for index, stride in zip(others, strides[1:], strict=True):
        within_row = within_row.unsqueeze(-1) + index * stride
    most = CPU_BLOCK_ELEMENTS if local.device.type == "cpu" else BLOCK_ELEMENTS
    block = max(1, most // max(1, within_row.numel()))
    for start in range(0, len(rows), block):
        first = rows[start : start + block] * strides[0]
        counter = first.view(-1, *[1] * within_row.ndim) + within_row
        values = _trunc_normal(_uniform(counter, key)) * std
        local[start : start + block] = values.to(torch.float32).to(local.dtype)


def _trunc_normal(uniform: torch.Tensor) -> torch.Tensor:
    low = 0.5 * math.erfc(3.0 / math.sqrt(2.0))
    return torch.special.ndtri(low + uniform * (1.0 - 2.0 * low)).clamp_(-3.0, 3.0)


def _uniform(counter: torch.Tensor, key: int) -> torch.Tensor:
    """splitmix64 (Steele, Lea and Flood, 2014) of each counter, as float64 in (0, 1).

    int64 arithmetic wraps modulo 2^64 on every device; only right shifts need care.
    """
    z = counter * _signed(0x9E3779B97F4A7C15) + key
    z = (z ^ _shift_right(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift_right(z, 27)) * _signed(0x94D049BB133111EB)
    z = z ^ _shift_right(z, 31)
    return (_shift_right(z, 11).to(torch.float64) + 0.5) * 2.0**-53


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(unsigned: int) -> int:
    return unsigned - (1 << 64) if unsigned >= 1 << 63 else unsigned


def _key(seed: int, fqn: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{fqn}".encode(), digest_size=8).digest()
    return _signed(int.from_bytes(digest, "little"))


def _global_indices(parameter: torch.Tensor) -> list[torch.Tensor]:
    """Per tensor dim, the global indices that this rank's part holds."""
    coordinate: Sequence[int] = ()
    if isinstance(parameter, DTensor):
        found = parameter.device_mesh.get_coordinate()
        assert found is not None, "this rank holds no part of the mesh"
        coordinate = found
    device = local_part(parameter).device
    held = part_of(parameter, coordinate)
    indices = [torch.arange(part.start, part.stop, device=device) for part in held]
    shape = tuple(local_part(parameter).shape)
    assert tuple(len(index) for index in indices) == shape, f"{parameter} is sharded in a new way"
    return indices
