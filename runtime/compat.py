"""What differs between the PyTorch releases and machines we run on; probed nowhere else."""

import os
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
