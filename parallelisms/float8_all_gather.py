"""FSDP2 all-gather in float8 of weights that are multiplied in float8: half the bytes, same bits.

The method is torchao's: https://pytorch.org/blog/training-using-float8-fsdp2/
"""

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from config.job_config import Parallelism
from parallelisms.float8 import (
    E4M3,
    WRAPPER_NAMES,
    Float8Linear,
    Float8Tensor,
    quantize,
    scale_from_amax,
)
from parallelisms.fsdp import FSDPPolicy
from parallelisms.pipeline_parallel import stages_per_rank
from runtime.compat import find, foreach
from runtime.dtensor import to_local
from runtime.log import logger

# The tensor that a DTensor wraps; ``to_local`` returns another object.
LOCAL_TENSOR = "torch.distributed.tensor:DTensor._local_tensor"


def apply_float8_all_gather(
    model: nn.Module,
    fsdp_mesh: DeviceMesh,
    *,
    parallelism: Parallelism,
    mp_policy: MixedPrecisionPolicy,
) -> None:
    """Quantize the shards of tensorwise weights before FSDP2 gathers them. Mutates ``model``.

    ``model``: FSDP2 is already applied. Shards are cast to the compute dtype first and scaled by
    the amax of the gathered weight, so results are bitwise those of quantizing after the gather.
    Before each forward, one all-reduce computes the scales of all weights not gathered yet.
    Rowwise weights are skipped, because backward needs scales of their columns. If FSDP2 cannot
    gather in float8, the reason is logged, and weights are gathered in the compute dtype.
    """
    linears = [m for m in model.modules() if isinstance(m, Float8Linear) and _is_tensorwise(m)]
    if not linears:
        return
    if reason := _unsupported_reason(parallelism):
        logger.info("float8 all-gather: off, weights in %s: %s", mp_policy.param_dtype, reason)
        return
    for linear in linears:
        linear.is_gathered_in_float8 = True
    group = fsdp_mesh.get_group(fsdp_mesh.ndim - 1)
    scales: dict[nn.Module, torch.Tensor] = {}

    @torch.no_grad()
    def update_scales(model: nn.Module, inputs: tuple[Any, ...]) -> None:
        sharded = [
            linear for linear in linears if not isinstance(to_local(linear.weight), Float8Tensor)
        ]
        if not sharded:
            return
        shards = [_wrapped_tensor(linear.weight) for linear in sharded]
        amaxes = torch.stack(foreach("norm", [_nonempty(s) for s in shards], torch.inf))
        amaxes = _rounded(amaxes, mp_policy)
        dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=group)
        scales.update(zip(sharded, _aligned(scale_from_amax(amaxes, E4M3)), strict=True))
        for shard in shards:
            # FSDP2 looks these up on the shards, which loading may have replaced.
            cast(Any, shard).fsdp_pre_all_gather = pre_all_gather
            cast(Any, shard).fsdp_post_all_gather = _post_all_gather

    def pre_all_gather(
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[torch.Tensor], torch.Tensor]:
        """Tensor that this rank sends, uint8, and the scale for ``_post_all_gather``."""
        shard, scale = cast(DTensor, module.weight).to_local(), scales[module]
        qdata = quantize(_rounded(shard, mp_policy), scale, E4M3).view(torch.uint8)
        # All ranks send as many rows as rank 0. If columns are sharded, no rows are missing.
        missing = -(-outer_size[0] // mesh.size()) - len(qdata)
        return (F.pad(qdata, (0, 0, 0, missing)) if missing > 0 else qdata,), scale

    # Runs before FSDP2's own hook, in which its streams wait for the work so far.
    model.register_forward_pre_hook(update_scales, prepend=True)
    logger.info("float8 all-gather: %d weights", len(linears))


def _post_all_gather(
    outputs: tuple[torch.Tensor],
    scale: torch.Tensor,
    dtype: torch.dtype,
    *,
    out: torch.Tensor | None = None,
) -> tuple[Float8Tensor, tuple[()]] | None:
    """Wrap gathered bytes as a weight. ``out``: weight of an earlier gather, refilled in place."""
    if out is None:
        return Float8Tensor(outputs[0].view(E4M3), scale, dtype), ()
    # Under tensor parallel, ``out`` is a DTensor.
    cast(Float8Tensor, _wrapped_tensor(out)).scale = scale
    return None


def _wrapped_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a DTensor wraps; any other tensor itself."""
    if isinstance(tensor, DTensor):
        return cast(torch.Tensor, find(LOCAL_TENSOR).__get__(tensor))
    return tensor


def gathered_in_float8(model: nn.Module) -> int:
    """Number of elements of the model's parameters, over all ranks, that are gathered in float8."""
    linears = (module for module in model.modules() if isinstance(module, Float8Linear))
    return sum(linear.weight.numel() for linear in linears if linear.is_gathered_in_float8)


def _is_tensorwise(linear: Float8Linear) -> bool:
    # On a single rank, weights may be plain tensors that are never gathered.
    return not linear.recipe.is_rowwise and isinstance(linear.weight, DTensor)


def _unsupported_reason(parallelism: Parallelism) -> str:
    """Reason why FSDP2 cannot gather in float8; "" if it can."""
    if not all(map(find, (LOCAL_TENSOR, *WRAPPER_NAMES))):
        return f"torch {torch.__version__} lacks private names that it needs"
    if parallelism.fsdp_cpu_offload:
        return "fsdp_cpu_offload gathers copies of the shards"
    if FSDPPolicy.of(parallelism).reshard_group_size:
        return "an integer fsdp_reshard_after_forward gathers again from unsharded weights"
    if stages_per_rank(parallelism) > 1:
        return "schedules with several stages per rank gather before forward begins"
    return ""


def _rounded(x: torch.Tensor, mp_policy: MixedPrecisionPolicy) -> torch.Tensor:
    """x rounded to the compute dtype, as float32."""
    assert mp_policy.param_dtype is not None
    return x.to(mp_policy.param_dtype).to(torch.float32)


def _aligned(scales: torch.Tensor) -> torch.Tensor:
    """``scales`` (n,), each at a multiple of 16 bytes, as cuBLAS reads them."""
    return scales.unsqueeze(1).repeat(1, 4)[:, 0]


def _nonempty(shard: torch.Tensor) -> torch.Tensor:
    return shard if shard.numel() else shard.new_zeros(1)
