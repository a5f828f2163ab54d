"""How fast ranks multiply and how fast they talk, for ``tools.preflight``.

Bandwidths are bus bandwidths by the convention of nccl-tests (its doc/PERFORMANCE.md): bytes over
seconds, times 2 (n - 1) / n for all-reduce and (n - 1) / n for all-gather, so that they compare
with a link's speed for any n. GB are 10^9 bytes.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from runtime.compat import all_gather_whole

ROUNDS, REPEATS = 4, 5
KINDS = ("all-reduce", "all-gather")
GB, MIB = 1e9, 2**20


def multiply_speed(device: torch.device) -> float:
    """TFLOP/s of a matrix product, while all ranks compute one. A collective."""
    n, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    # Products of equal numbers take less power, and so less time.
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    dist.barrier()
    return 2 * n**3 / best_seconds(lambda: a @ b, device) / 1e12


def link_speed(device: torch.device, *, node: int, n_nodes: int) -> float:
    """GB/s each way of this rank's best link to a few others; 0 without another. A collective.

    Between nodes, which have equally many ranks, to the rank of its place; on one node, to any.
    """
    rank, n_local = dist.get_rank(), dist.get_world_size() // n_nodes
    own, count, stride = (node, n_nodes, n_local) if n_nodes > 1 else (rank, n_local, 1)
    out = torch.ones(message_bytes(device) // 4, device=device)
    incoming = torch.empty_like(out)
    # NCCL wants all ranks in a group's first collective.
    dist.all_reduce(torch.ones(1, device=device))
    best = 0.0
    for number in range(min(ROUNDS, n_rounds(count))):
        other = partner(own, count, number)
        if other is not None:
            act = partial(exchange, out, incoming, rank + (other - own) * stride)
            best = max(best, out.nbytes / best_seconds(act, device) / GB)
    return best


def n_rounds(count: int) -> int:
    """Rounds of a tournament in which each of ``count`` meets every other one once."""
    return count - 1 + count % 2


def partner(own: int, count: int, number: int) -> int | None:
    """The one that ``own`` meets in round ``number`` of that tournament, if any."""
    n = n_rounds(count)
    if own == n:
        return next(other for other in range(n) if (2 * other - number) % n == 0)
    # One that would meet itself meets the last one instead, which exists if ``count`` is even.
    other = (number - own) % n
    other = n if other == own else other
    return other if other < count else None


def exchange(out: torch.Tensor, incoming: torch.Tensor, peer: int) -> None:
    both = [dist.P2POp(dist.isend, out, peer), dist.P2POp(dist.irecv, incoming, peer)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def groups_of(
    meshes: list[DeviceMesh],
) -> list[tuple[str, list[list[int]], dist.ProcessGroup]]:
    """For each dim larger than 1: its name, its groups of ranks, and the one this rank is in.

    Dims that have the same groups are joined to one.
    """
    names: dict[str, list[str]] = {}
    found: dict[str, tuple[list[list[int]], dist.ProcessGroup]] = {}
    for mesh in meshes:
        for number, name in enumerate(mesh.mesh_dim_names or ()):
            size = mesh.size(number)
            if size > 1:
                groups = mesh.mesh.movedim(number, -1).reshape(-1, size).tolist()
                found.setdefault(str(groups), (groups, mesh.get_group(name)))
                names.setdefault(str(groups), []).append(name)
    return [(" = ".join(dict.fromkeys(names[key])), *value) for key, value in found.items()]


def bus_bandwidth(kind: str, group: dist.ProcessGroup, device: torch.device) -> float:
    """GB/s of one of ``KINDS``. A collective."""
    n = dist.get_world_size(group)
    whole = torch.zeros(message_bytes(device) // 4 // n * n, device=device)
    act: Callable[[], Any]
    if kind == "all-reduce":
        share, act = 2 * (n - 1) / n, partial(dist.all_reduce, whole, group=group)
    else:
        part = torch.zeros(len(whole) // n, device=device)
        share, act = (n - 1) / n, partial(all_gather_whole, whole, part, group)
    return whole.nbytes * share / best_seconds(act, device) / GB


def message_bytes(device: torch.device) -> int:
    return (256 if device.type == "cuda" else 16) * MIB


def best_seconds(act: Callable[[], Any], device: torch.device) -> float:
    """Seconds of the fastest of a few calls, after one to warm up."""
    seconds = []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])
