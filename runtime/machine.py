"""What differs between the machines we run on; probed nowhere else."""

import ctypes
import os
import signal
import socket
import sys
from pathlib import Path

import torch

from runtime.compat import find


def cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware."""
    probes = (find("torch.cpu:_is_avx512_bf16_supported"), find("torch.cpu:_is_amx_tile_supported"))
    return any(probe() for probe in probes if probe is not None)


def cpu_is_intel() -> bool:
    """Whether Intel made this CPU; only Linux says."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "GenuineIntel" in cpuinfo.read_text()


def has_float8() -> bool:
    """Whether this GPU multiplies float8 matrices in hardware."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def usable_cpus() -> int:
    """CPUs this process may run on; macOS does not say, so all of them there."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def keep_freed_memory() -> None:
    """Have malloc keep what tensors give back; else each new tensor's pages are mapped and zeroed.

    Tensors of a step are as large as those of the last one, so little is kept for nothing. C
    libraries without ``mallopt`` go on as they do.
    """
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    # Older releases of glibc take no more than 32 MiB.
    if any(mallopt(M_MMAP_THRESHOLD, size) for size in (1 << 30, 32 << 20)):
        mallopt(M_TRIM_THRESHOLD, -1)


def let_segments_grow() -> None:
    """Have processes started from now on take a GPU's memory in segments that grow, unless the
    user has said how.

    Steps whose documents or experts' tokens differ in length do not fit what others left in
    segments of fixed size.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is the older one
    if torch.cuda.is_available() and not os.environ.keys() & names:
        os.environ[names[0]] = "expandable_segments:True"


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
    # The parent may have ended before this call.
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)
