"""Allocation and initial weights of a sharded model: bitwise the same weights on any mesh.

Every element is a counter-based function of (seed, canonical FQN, global index). Each rank computes
its own shard, without communication or RNG state. DTensor's random ops are not an alternative: on
CPU they silently give every shard the same values.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from parallelisms.tied_weights import preserve_tied_weights
from runtime.compat import find
from runtime.dtensor import shard_slices, to_local

# Elements generated at once. There are about five float64 or int64 temporaries for each element.
# On a CPU they should fit its cache, which is 3.5 times as fast.
BLOCK_ELEMENTS, CPU_BLOCK_ELEMENTS = 1 << 22, 1 << 17


def materialize(
    model: nn.Module, device: torch.device, *, seed: int, is_offloaded: bool = False
) -> None:
    """Allocate this rank's shards on ``device`` and call ``model.init_weights``. Mutates ``model``.

    ``is_offloaded``: parameters are allocated in host memory, and only buffers on ``device``.
    Raises ``ValueError`` if ``init_weights`` leaves tensors unfilled, whose names it gives, or
    draws from PyTorch's generator, whose numbers depend on the mesh.
    """
    allocate(model, device, is_offloaded=is_offloaded)
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    with torch.no_grad():
        for tensor in tensors.values():
            if tensor.is_floating_point():
                to_local(tensor).fill_(torch.nan)
    # No integer is invalid in itself, so what was not written at all is found.
    versions = {fqn: to_local(tensor)._version for fqn, tensor in tensors.items()}
    fqns = {id(tensor): fqn for fqn, tensor in tensors.items()}

    def trunc_normal_(parameter: torch.Tensor, *, std: float) -> None:
        fill_trunc_normal(parameter, std=std, key=_key(seed, fqns[id(parameter)]))

    with _no_random_ops(fqns):
        cast(Callable, model.init_weights)(trunc_normal_)
    unfilled = [
        fqn
        for fqn, local in ((fqn, to_local(tensor)) for fqn, tensor in tensors.items())
        if (local.isnan().any() if local.is_floating_point() else local._version == versions[fqn])
    ]
    if unfilled:
        raise ValueError(f"init_weights does not fill {', '.join(unfilled)}")


def _no_random_ops(fqns: Mapping[int, str]) -> AbstractContextManager[object]:
    """Context in which an op that draws from PyTorch's default generator raises ``ValueError``.

    ``fqns``: by id of the tensor.
    """
    dispatch_mode: Any = find("torch.utils._python_dispatch:TorchDispatchMode")
    if dispatch_mode is None:
        return nullcontext()

    class NoRandomOps(dispatch_mode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
                fqn = fqns.get(id(args[0])) if args else None
                what = func.overloadpacket.__name__ + (f" on {fqn}" if fqn else "")
                reason = "whose values would differ between meshes: use trunc_normal_"
                raise ValueError(f"init_weights calls {what}, {reason}")
            return func(*args, **kwargs)

    return NoRandomOps()


def allocate(model: nn.Module, device: torch.device, *, is_offloaded: bool = False) -> None:
    """Allocate this rank's shards, as ``materialize`` does, without values. Mutates ``model``."""
    with preserve_tied_weights(model):
        model.to_empty(device=torch.device("cpu") if is_offloaded else device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


@torch.no_grad()
def fill_trunc_normal(parameter: torch.Tensor, *, std: float, key: int) -> None:
    """Fill this rank's shard with a normal of mean 0, truncated at 3 ``std``.

    Mutates ``parameter``, of any shape. ``key``: int64. Inverse transform sampling takes one pass
    without rejection, so no rank waits for another.
    """
    local = to_local(parameter)
    if local.numel() == 0:
        return
    rows, *others = _global_indices(parameter)
    strides = [math.prod(parameter.shape[dim + 1 :]) for dim in range(parameter.ndim)]
    within_row = torch.zeros((), dtype=torch.int64, device=local.device)
    for index, stride in zip(others, strides[1:], strict=True):
        within_row = within_row.unsqueeze(-1) + index * stride
    max_elements = CPU_BLOCK_ELEMENTS if local.device.type == "cpu" else BLOCK_ELEMENTS
    block = max(1, max_elements // max(1, within_row.numel()))
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

    int64 arithmetic wraps modulo 2^64 on every device; only right shifts differ from uint64.
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
    """Global indices of this rank's shard, one 1-D tensor per dim."""
    coordinate: Sequence[int] = ()
    if isinstance(parameter, DTensor):
        found = parameter.device_mesh.get_coordinate()
        assert found is not None, "this rank is not in the parameter's mesh"
        coordinate = found
    device = to_local(parameter).device
    slices = shard_slices(parameter, coordinate)
    indices = [torch.arange(each.start, each.stop, device=device) for each in slices]
    shape = tuple(to_local(parameter).shape)
    assert tuple(len(index) for index in indices) == shape, f"{parameter} has an unknown sharding"
    return indices
