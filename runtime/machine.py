"""Properties and settings of this machine, without PyTorch; ``torch_device.py`` has the others."""

import ctypes
import math
import os
import resource
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def cpu_is_intel() -> bool:
    """True if this is an Intel CPU; False outside Linux."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "GenuineIntel" in cpuinfo.read_text()


def available_cpus() -> int:
    """Number of CPUs this process may run on; all CPUs where the OS does not say (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def raise_open_file_limit() -> None:
    """Raise this process's soft limit of open files, often 1,024, to the hard one.

    Sources of a mixture map thousands of files, every rank is connected to many others, and the
    head node's launcher to all.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # Some systems have a lower maximum than their hard limit.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def schedule_as_batch() -> None:
    """Make this thread, and those that it starts, batch work of Linux (SCHED_BATCH).

    A batch thread that wakes up does not preempt the one that runs. Gloo's thread polls without a
    pause while another thread has the lock of a connection; if it has preempted that thread, both
    lose their time. A policy that somebody chose stays.
    """
    with suppress(OSError):  # Some sandboxes forbid it.
        if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def open_file_limit() -> int:
    """Files that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def disable_malloc_trim() -> None:
    """Make malloc keep freed memory, or each new tensor's pages are mapped and zeroed again.

    Each step needs the same tensor sizes, so little memory is wasted. Does nothing without
    ``mallopt`` (other C libraries than glibc).
    """
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    # Older glibc releases accept at most 32 MiB.
    if any(mallopt(M_MMAP_THRESHOLD, size) for size in (1 << 30, 32 << 20)):
        mallopt(M_TRIM_THRESHOLD, -1)


def own_memory() -> int:
    """Bytes of this process that no file backs (RSS without pages of files); 0 outside Linux."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0
    resident, shared = map(int, statm.read_text().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def host_memory(root: Path = Path("/")) -> float:
    """Bytes of this machine's memory, or of a limit of this process's control groups.

    Infinite where the OS does not say.
    """
    found = _number_after(root / "proc/meminfo", "MemTotal:")
    limits = [_number_after(group / limit, "") for group, limit, *_ in _control_groups(root)]
    return min([math.inf if found is None else found * 1024.0, *filter(None, limits)])


def host_memory_left(root: Path = Path("/")) -> float:
    """Bytes that this process may still take, of the machine or of a limit of its control groups.

    Infinite where the OS does not say.
    """
    found = _number_after(root / "proc/meminfo", "MemAvailable:")
    left = [math.inf if found is None else found * 1024.0]
    left += [_left_in(*group) for group in _control_groups(root)]
    return max(0.0, min(left))


# Names of a group's files, and a prefix of a line; version 1 has others.
CGROUP_V2 = ("memory.max", "memory.current", "")
CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _control_groups(root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Iterate over the folders of this process's groups that limit memory, and their names."""
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        group = top / path.strip("/")
        # In a container, the path may be that of the host.
        for each in (group, *group.parents):
            if each == top or top in each.parents:
                yield each, *(CGROUP_V1 if controllers else CGROUP_V2)


def _left_in(group: Path, limit: str, usage: str, prefix: str) -> float:
    """Bytes left in a control group: files in the page cache make room."""
    most, used = (_number_after(group / name, "") for name in (limit, usage))
    if most is None or used is None:
        return math.inf
    cached = _number_after(group / "memory.stat", f"{prefix}inactive_file ")
    return float(most - used + (cached or 0))


def _number_after(path: Path, name: str) -> int | None:
    """Number in the first line of a file of the kernel that begins with ``name``, if any."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    text = next((line.removeprefix(name).split()[0] for line in lines if line.startswith(name)), "")
    return int(text) if text.isdecimal() else None


def loopback_interface() -> str:
    """Name of the loopback network interface, which no other machine can reach."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
