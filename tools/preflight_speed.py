"""Matmul and communication speeds of ranks, for ``tools.preflight``.

Bandwidths are bus bandwidths as defined by nccl-tests (doc/PERFORMANCE.md): bytes over seconds,
times 2 (n - 1) / n for all-reduce and (n - 1) / n for all-gather. They compare with a link's speed
for any n. 1 GB is 10^9 bytes.
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
# On CPUs, many matmuls of less than a millisecond: other processes interrupt some, not all.
CPU_SIZE, CPU_REPEATS = 256, 1000
KINDS = ("all-reduce", "all-gather")
GB, MIB = 1e9, 2**20


def matmul_speed(device: torch.device) -> float:
    """TFLOP/s of a matmul, measured on all ranks at the same time. Collective."""
    on_gpu = device.type == "cuda"
    n, dtype = (8192, torch.bfloat16) if on_gpu else (CPU_SIZE, torch.float32)
    # Random inputs: a matmul of constants takes less power and runs faster.
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    dist.barrier()
    seconds = best_seconds(lambda: a @ b, device, REPEATS if on_gpu else CPU_REPEATS)
    return 2 * n**3 / seconds / 1e12


def link_speed(device: torch.device, *, node: int, n_nodes: int) -> float:
    """GB/s per direction of this rank's best link to a few peers; 0 without a peer. Collective.

    With several nodes, which must have equally many ranks, peers are the ranks of the same local
    rank on other nodes; on one node, all other ranks.
    """
    rank, n_local = dist.get_rank(), dist.get_world_size() // n_nodes
    own, count, stride = (node, n_nodes, n_local) if n_nodes > 1 else (rank, n_local, 1)
    out = torch.ones(message_bytes(device) // 4, device=device)
    incoming = torch.empty_like(out)
    # NCCL requires all ranks in the first collective of a group.
    dist.all_reduce(torch.ones(1, device=device))
    best = 0.0
    for number in range(min(ROUNDS, n_rounds(count))):
        other = partner(own, count, number)
        if other is not None:
            call = partial(exchange, out, incoming, rank + (other - own) * stride)
            best = max(best, out.nbytes / best_seconds(call, device) / GB)
    return best


def n_rounds(count: int) -> int:
    """Number of rounds of a round-robin tournament of ``count`` participants."""
    return count - 1 + count % 2


def partner(own: int, count: int, number: int) -> int | None:
    """Partner of ``own`` in round ``number`` of that tournament, if any."""
    n = n_rounds(count)
    if own == n:
        return next(other for other in range(n) if (2 * other - number) % n == 0)
    # Who would meet itself meets the last participant, which exists if ``count`` is even.
    other = (number - own) % n
    other = n if other == own else other
    return other if other < count else None


def exchange(out: torch.Tensor, incoming: torch.Tensor, peer: int) -> None:
    """Send ``out`` to ``peer`` and receive ``incoming`` from it. Mutates ``incoming``."""
    both = [dist.P2POp(dist.isend, out, peer), dist.P2POp(dist.irecv, incoming, peer)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def mesh_groups(
    meshes: list[DeviceMesh],
) -> list[tuple[str, list[list[int]], dist.ProcessGroup]]:
    """List name, groups of ranks and this rank's process group of each dim larger than 1.

    Dims with the same groups are merged into one entry.
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
    """Bus bandwidth in GB/s of a collective, one of ``KINDS``. Collective."""
    n = dist.get_world_size(group)
    whole = torch.zeros(message_bytes(device) // 4 // n * n, device=device)
    call: Callable[[], Any]
    if kind == "all-reduce":
        factor, call = 2 * (n - 1) / n, partial(dist.all_reduce, whole, group=group)
    else:
        shard = torch.zeros(len(whole) // n, device=device)
        factor, call = (n - 1) / n, partial(all_gather_whole, whole, shard, group)
    return whole.nbytes * factor / best_seconds(call, device) / GB


def message_bytes(device: torch.device) -> int:
    return (256 if device.type == "cuda" else 16) * MIB


def best_seconds(call: Callable[[], Any], device: torch.device, repeats: int = REPEATS) -> float:
    """Seconds of the fastest of ``repeats`` calls, after one warmup call."""
    seconds = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])
