"""What data parallelism sends in a step, and whether computing takes long enough to hide it."""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from config.job_config import Parallelism
from parallelisms.float8_all_gather import gathered_in_float8
from parallelisms.parallel_dims import ParallelDims
from runtime.log import logger

# The share of the peak that well-tuned training reaches.
ATTAINED = 0.55
PROBE_BYTES, PROBES = 1 << 26, 3


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that each rank sends in one step, by collective, with ring algorithms."""

    all_gather: float
    reduce_scatter: float
    all_reduce: float


def warn_of_traffic(
    model: nn.Module,
    dims: ParallelDims,
    parallelism: Parallelism,
    mp_policy: MixedPrecisionPolicy,
    *,
    n_tokens: int,
    microbatches: int,
    flops_per_token: float,
    peak_flops: float,
) -> None:
    """Measure the links, and warn if ``n_tokens`` per rank and microbatch are too few to hide it.

    The weights travel once or twice per microbatch whatever its size, so only tokens outweigh them:
    8 bytes a parameter against 6 FLOPs a parameter and token. A collective.
    """
    # Tensor parallel divides both what travels and what is computed.
    tp = dims.degrees.tp
    traffic = step_traffic(
        parallelism,
        mp_policy,
        n_parameters=sum(p.numel() for p in model.parameters()) // tp,
        n_float8=gathered_in_float8(model) // tp,
        n_shards=dims.weight_mesh["dp_shard_cp"].size(),
        n_replicas=dims.weight_mesh["dp_replicate"].size(),
        microbatches=microbatches,
    )
    seconds = 0.0
    for name, sent in (
        ("dp_shard_cp", traffic.all_gather + traffic.reduce_scatter),
        ("dp_replicate", traffic.all_reduce),
    ):
        if sent > 0:
            seconds += sent / _bus_bandwidth(dims.weight_mesh[name])
    needed = seconds * ATTAINED * peak_flops / (flops_per_token / tp) / microbatches
    if n_tokens < needed:
        logger.warning(
            "%s tokens per rank and microbatch do not hide the %.1f ms that weights and gradients "
            "travel in a step, %s would: raise training.local_batch_size or training.seq_len, or "
            "see docs/data_parallel.md", f"{n_tokens:,}", 1e3 * seconds, f"{round(needed):,}",
        )  # fmt: skip


def step_traffic(
    parallelism: Parallelism,
    mp_policy: MixedPrecisionPolicy,
    *,
    n_parameters: int,
    n_shards: int,
    n_replicas: int,
    microbatches: int,
    n_float8: int = 0,
) -> Traffic:
    """The closed form: (n-1)/n of the whole per gather or scatter, twice that per all-reduce.

    As if every weight were gathered twice, for forward and backward: those that backward does not
    gather again, an embedding's and by default the last unit's, are counted once too often.
    ``n_float8`` of the parameters are gathered in a byte each.
    """
    assert mp_policy.param_dtype is not None
    assert mp_policy.reduce_dtype is not None
    weights = (n_parameters - n_float8) * mp_policy.param_dtype.itemsize + n_float8
    gradients = n_parameters * mp_policy.reduce_dtype.itemsize
    mode, reshard = parallelism.data_parallel, parallelism.fsdp_reshard_after_forward
    is_fsdp2 = mode == "fsdp2"
    over_shards, over_replicas = 1 - 1 / n_shards, 1 - 1 / n_replicas
    forward_gathers = 1 if is_fsdp2 and reshard == "never" else microbatches
    backward_gathers = 0 if reshard == "never" else microbatches
    # What stays spread over a smaller group is gathered over that group.
    over_kept = 1 - 1 / reshard if isinstance(reshard, int) else over_shards
    is_once = is_fsdp2 and parallelism.fsdp_reduce_gradients == "last_microbatch"
    scatters = 1 if is_once else microbatches
    reductions = microbatches if mode == "simple_fsdp" else 1
    return Traffic(
        all_gather=weights * (forward_gathers * over_shards + backward_gathers * over_kept),
        reduce_scatter=scatters * gradients * over_shards,
        all_reduce=2 * reductions * gradients / n_shards * over_replicas,
    )


def _bus_bandwidth(mesh: DeviceMesh) -> float:
    """Bytes per second that each rank of a 1-D mesh sends in an all-reduce; the best of a few."""
    probe = torch.zeros(PROBE_BYTES // 4, device=mesh.device_type)
    sent, best = 2 * (1 - 1 / mesh.size()) * PROBE_BYTES, 0.0
    for _ in range(PROBES):
        begin = time.perf_counter()
        dist.all_reduce(probe, group=mesh.get_group())
        # The host waits for the result, and so for the collective.
        probe[-1].item()
        best = max(best, sent / (time.perf_counter() - begin))
    # The slowest rank's, so that all come to the same result.
    slowest = torch.tensor(best, dtype=torch.float64, device=mesh.device_type)
    dist.all_reduce(slowest, op=dist.ReduceOp.MIN, group=mesh.get_group())
    return slowest.item()
