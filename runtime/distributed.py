"""Process groups, this rank's device, seeds, and sums over ranks."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from config.job_config import Comm, Debug, Training
from runtime.compat import give_gloo_one_worker, set_default_timeout
from runtime.machine import cpu_has_bfloat16, loopback_interface


def init_distributed(comm: Comm) -> torch.device:
    """Start the default process group; return this rank's device.

    Under torchrun the environment says who we are; without it this is a group of one.
    """
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        # All ranks are on this machine: what they listen on is nobody else's business.
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", loopback_interface())
    timeout = timedelta(seconds=comm.init_timeout_seconds)
    set_default_timeout(timeout)
    give_gloo_one_worker()
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        device = torch.device("cpu")
        backend = "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    return device


def set_seed(debug: Debug) -> None:
    """Seed the global RNG, equal on all ranks. Weights and data do not use it."""
    torch.manual_seed(debug.seed)
    if debug.deterministic or debug.is_elastic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if debug.is_elastic:
        # Kernels split sums over threads, and with fewer ranks each of them would have more.
        torch.set_num_threads(1)


def compute_dtype(training: Training, device: torch.device) -> torch.dtype:
    """The dtype of matrix products: what was asked, or with "auto" the best the hardware has."""
    if training.dtype != "float32":
        return getattr(torch, training.dtype)
    if training.mixed_precision_param != "auto":
        return getattr(torch, training.mixed_precision_param)
    if device.type == "cuda":
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_bfloat16 = cpu_has_bfloat16()
    return torch.bfloat16 if has_bfloat16 else torch.float32


def sum_over(value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The sum of a detached tensor over a 1-D mesh; ``value`` itself is left alone."""
    total = value.detach().clone()
    dist.all_reduce(total, group=mesh.get_group())
    return total


def sum_in_order(values: torch.Tensor, data_mesh: DeviceMesh) -> torch.Tensor:
    """The sum of all ranks' values of each microbatch (microbatches,), a scalar.

    Over pp, batch and cp of ``data_mesh``. The parts of a microbatch first; then in the order of
    the global batch's rows, microbatch by microbatch and within it rank by rank, so the same values
    give the same bits on any number of ranks.
    """
    values = values.detach()
    for dim in ("pp", "cp"):
        group = data_mesh.get_group(dim)
        if group.size() > 1:
            values = _gather(values, group).sum(dim=0)
    return _gather(values, data_mesh.get_group("batch")).t().flatten().sum()


def _gather(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """(ranks, ...)."""
    gathered = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(gathered, values.contiguous(), group=group)
    return torch.stack(gathered)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds: all of one that is not distributed."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
