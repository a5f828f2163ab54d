"""What differs between the PyTorch releases and machines we run on; probed nowhere else."""

import ctypes
import importlib.util
import os
import signal
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GLOO_TIMEOUT = dist.distributed_c10d.default_pg_timeout


def cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)


def cpu_is_intel() -> bool:
    """Whether Intel made this CPU; only Linux says."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "GenuineIntel" in cpuinfo.read_text()


def has_float8() -> bool:
    """Whether this GPU multiplies float8 matrices in hardware."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def is_installed(package: str) -> bool:
    """Whether ``package`` is there; to find one inside another, the outer one is imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False


def usable_cpus() -> int:
    """CPUs this process may run on; macOS does not say, so all of them there."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_default_timeout(timeout: timedelta) -> None:
    """Give this timeout to every process group made from now on, such as those of meshes, which
    would have half an hour whatever the first group has. NCCL's alone have another default."""
    dist.distributed_c10d.default_pg_timeout = timeout


def set_timeout(timeout: timedelta) -> None:
    """Change the timeout of every process group, now that warm-up is over."""
    for group in dist.distributed_c10d._world.pg_map:
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def all_gather_whole(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill ``whole`` with every rank's ``part``, without a copy. A collective."""
    # Its name since 2.13.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, part, group=group)


def give_gloo_one_worker() -> None:
    """Have every gloo group made from now on run its collectives in one thread, not in two.

    In 2.13 both threads write the name of what they finished last to one string without a lock
    (ProcessGroupGloo::runLoop). Names of more than 15 letters, such as the functional all-gather's,
    are on the heap, and are at times freed twice: every few hours a rank dies of it.
    """
    gloo = getattr(dist, "ProcessGroupGloo", None)
    if gloo is None or hasattr(gloo, "_two_workers_init"):
        return
    original = gloo._two_workers_init = gloo.__init__

    def init(
        self: Any, store: dist.Store, rank: int, size: int, timeout: timedelta = GLOO_TIMEOUT
    ) -> None:
        # What PyTorch itself would choose, which it does only when it is given no options.
        names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        devices = [gloo.create_device(interface=name) for name in names]
        options = gloo._Options()
        options._timeout, options._threads = timeout, 1
        options._devices = devices or [gloo.create_default_device()]
        original(self, store, rank, size, options)

    gloo.__init__ = init


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
