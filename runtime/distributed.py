"""Process group setup, device, seed, and reductions over ranks."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from config.job_config import Comm, Debug, Training
from runtime.compat import limit_gloo_to_one_thread, set_default_timeout
from runtime.log import show_phase
from runtime.machine import loopback_interface, schedule_as_batch
from runtime.torch_device import cpu_has_bfloat16, gpu_has_bfloat16


def init_distributed(comm: Comm) -> torch.device:
    """Initialize the default process group and return this rank's device. Collective.

    Reads torchrun's environment variables; without them, creates a group of one rank.
    """
    show_phase("connecting the ranks")
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        # All ranks are on this machine, so no other machine needs to reach their ports.
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", loopback_interface())
    timeout = timedelta(seconds=comm.init_timeout_seconds)
    set_default_timeout(timeout)
    limit_gloo_to_one_thread()
    if torch.cuda.is_available():
        # Slurm may show each rank only its own GPU, and NCCL may let ranks share one.
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        device = torch.device("cpu")
        backend = "gloo"
        schedule_as_batch()
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    return device


def set_seed(debug: Debug) -> None:
    """Seed the global RNG and select deterministic kernels, equally on all ranks.

    Weights and data do not use the global RNG.
    """
    torch.manual_seed(debug.seed)
    if debug.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if debug.is_elastic:
        # Kernels split sums over threads, and the number of threads depends on the ranks.
        torch.set_num_threads(1)


def compute_dtype(training: Training, device: torch.device) -> torch.dtype:
    """Dtype of matmuls; ``auto`` is bfloat16 if the hardware supports it, else float32."""
    if training.dtype != "float32":
        return getattr(torch, training.dtype)
    if training.mixed_precision_param != "auto":
        return getattr(torch, training.mixed_precision_param)
    has_bfloat16 = gpu_has_bfloat16() if device.type == "cuda" else cpu_has_bfloat16()
    return torch.bfloat16 if has_bfloat16 else torch.float32


def sum_over(value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """All-reduce a copy of ``value`` over a 1-D mesh, without a gradient. Collective."""
    total = value.detach().clone()
    dist.all_reduce(total, group=mesh.get_group())
    return total


def sum_in_order(values: torch.Tensor, data_mesh: DeviceMesh) -> torch.Tensor:
    """Sum all ranks' ``values`` (microbatches,) to a scalar in a fixed order. Collective.

    Sums over pp and cp first, then over the global batch's rows: microbatch by microbatch, and by
    rank within each. The result is therefore bitwise equal on any number of dp ranks. tp ranks hold
    equal values, so they are not summed.
    """
    values = values.detach()
    for dim in ("pp", "cp"):
        group = data_mesh.get_group(dim)
        if group.size() > 1:
            values = _gather(values, group).sum(dim=0)
    return _gather(values, data_mesh.get_group("batch")).t().flatten().sum()


def _gather(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All-gather ``values`` (...) to (ranks, ...). Collective."""
    gathered = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(gathered, values.contiguous(), group=group)
    return torch.stack(gathered)
