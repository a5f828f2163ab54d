"""Communication volume of data parallelism, and a warning if compute is too short to hide it."""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from config.job_config import Parallelism
from parallelisms.float8_all_gather import gathered_in_float8
from parallelisms.fsdp import FSDPPolicy
from parallelisms.parallel_dims import ParallelDims
from runtime.log import logger

# MFU that well-tuned training reaches.
ASSUMED_MFU = 0.55
PROBE_BYTES, PROBES = 1 << 26, 3


@dataclass(frozen=True, kw_only=True)
class CommVolume:
    """Bytes that each rank sends in one step, by collective, with ring algorithms."""

    all_gather: float
    reduce_scatter: float
    all_reduce: float


def warn_if_comm_bound(
    model: nn.Module,
    dims: ParallelDims,
    parallelism: Parallelism,
    mp_policy: MixedPrecisionPolicy,
    *,
    n_tokens: int,
    n_microbatches: int,
    flops_per_token: float,
    peak_flops: float,
    may_skip_layers: bool = False,
) -> None:
    """Warn if ``n_tokens`` per rank and microbatch are too few to hide communication. Collective.

    Measures the bandwidth. What a microbatch communicates does not depend on its size; what it
    computes does: ``flops_per_token``.
    """
    # Tensor parallel divides both the communication and the compute.
    tp = dims.degrees.tp
    volume = step_comm_volume(
        parallelism,
        mp_policy,
        n_parameters=sum(p.numel() for p in model.parameters()) // tp,
        n_float8=gathered_in_float8(model) // tp,
        n_shards=dims.weight_mesh["dp_shard_cp"].size(),
        n_replicas=dims.weight_mesh["dp_replicate"].size(),
        n_microbatches=n_microbatches,
        may_skip_layers=may_skip_layers,
    )
    seconds = 0.0
    for name, sent in (
        ("dp_shard_cp", volume.all_gather + volume.reduce_scatter),
        ("dp_replicate", volume.all_reduce),
    ):
        if sent > 0:
            seconds += sent / _bus_bandwidth(dims.weight_mesh[name])
    needed = seconds * ASSUMED_MFU * peak_flops / (flops_per_token / tp) / n_microbatches
    if n_tokens < needed:
        logger.warning(
            "data parallel: communication-bound: %s tokens per rank and microbatch do not hide the "
            "%.1f ms of communication per step, %s would: raise training.local_batch_size or "
            "training.seq_len, or see docs/data_parallel.md",
            f"{n_tokens:,}", 1e3 * seconds, f"{round(needed):,}",
        )  # fmt: skip


def step_comm_volume(
    parallelism: Parallelism,
    mp_policy: MixedPrecisionPolicy,
    *,
    n_parameters: int,
    n_shards: int,
    n_replicas: int,
    n_microbatches: int,
    n_float8: int = 0,
    may_skip_layers: bool = False,
) -> CommVolume:
    """Return the bytes that ring collectives send in a step, in closed form.

    An all-gather or reduce-scatter sends (n-1)/n of the tensor, an all-reduce twice that. Every
    weight counts as gathered for forward and for backward, although backward does not gather the
    embedding's again, nor by default the last unit's. ``n_float8`` parameters take one byte each.
    """
    assert mp_policy.param_dtype is not None
    assert mp_policy.reduce_dtype is not None
    weights = (n_parameters - n_float8) * mp_policy.param_dtype.itemsize + n_float8
    gradients = n_parameters * mp_policy.reduce_dtype.itemsize
    mode = parallelism.data_parallel
    policy = FSDPPolicy.of(parallelism, may_skip_layers=may_skip_layers)
    is_fsdp2, group = mode == "fsdp2", policy.reshard_group_size
    shard_fraction, replica_fraction = 1 - 1 / n_shards, 1 - 1 / n_replicas
    forward_gathers = n_microbatches if policy.reshard_units or not is_fsdp2 else 1
    backward_gathers = n_microbatches if policy.reshard_units else 0
    # With a reshard group, backward gathers over that group only.
    backward_fraction = 1 - 1 / group if group is not None else shard_fraction
    scatters = n_microbatches if policy.reduce_every_microbatch or not is_fsdp2 else 1
    reductions = n_microbatches if policy.all_reduce_every_microbatch else 1
    return CommVolume(
        all_gather=weights
        * (forward_gathers * shard_fraction + backward_gathers * backward_fraction),
        reduce_scatter=scatters * gradients * shard_fraction,
        all_reduce=2 * reductions * gradients / n_shards * replica_fraction,
    )


def _bus_bandwidth(mesh: DeviceMesh) -> float:
    """Measure the bytes per second that a rank of a 1-D mesh sends in an all-reduce.

    Collective over all ranks. Returns that of the slowest one, so that all warn alike, or none.
    """
    probe = torch.zeros(PROBE_BYTES // 4, device=mesh.device_type)
    sent, best = 2 * (1 - 1 / mesh.size()) * PROBE_BYTES, 0.0
    for _ in range(PROBES):
        begin = time.perf_counter()
        dist.all_reduce(probe, group=mesh.get_group())
        # Reading the result waits for the collective.
        probe[-1].item()
        best = max(best, sent / (time.perf_counter() - begin))
    slowest = torch.tensor(best, dtype=torch.float64, device=mesh.device_type)
    dist.all_reduce(slowest, op=dist.ReduceOp.MIN)
    return slowest.item()
