"""What differs between the PyTorch releases and machines we run on; probed nowhere else."""

import ctypes
import os
import signal
import socket
import sys
from datetime import timedelta

import torch
import torch.distributed as dist


def cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)


def usable_cpus() -> int:
    """CPUs this process may run on; macOS does not say, so all of them there."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_timeout(timeout: timedelta) -> None:
    """Change the timeout of every process group, now that warm-up is over."""
    for group in dist.distributed_c10d._world.pg_map:
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def all_gather_whole(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill ``whole`` with every rank's ``part``, without a copy. A collective."""
    # Its name since 2.13.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, part, group=group)


def loopback_interface() -> str:
    """The name of the network interface that nothing outside this machine can reach."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when process ``parent`` ends. Linux only."""
    if sys.platform != "linux":
        return
    PR_SET_PDEATHSIG = 1
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    # It may have ended before it was asked for.
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)
