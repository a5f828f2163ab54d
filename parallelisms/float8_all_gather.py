"""FSDP2 that gathers in float8 what is multiplied in float8: half of the bytes, the same bits."""

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from config.job_config import Parallelism
from parallelisms.float8 import E4M3, Float8Linear, Float8Weight, round_to, scale_of
from parallelisms.pipeline_parallel import stages_per_rank
from runtime.compat import find, foreach
from runtime.distributed import local_part
from runtime.log import logger

# The very tensor that a DTensor holds, of which ``to_local`` makes another.
LOCAL_TENSOR = "torch.distributed.tensor:DTensor._local_tensor"
NEEDED = (
    LOCAL_TENSOR,
    # For a tensor of a class of ours that holds others.
    "torch:Tensor._make_wrapper_subclass",
    "torch:_C._disabled_torch_function_impl",
)


def apply_float8_all_gather(
    model: nn.Module,
    fsdp_mesh: DeviceMesh,
    *,
    parallelism: Parallelism,
    mp_policy: MixedPrecisionPolicy,
) -> None:
    """Have ranks round their shards of tensorwise weights before they are gathered.

    Mutates ``model``, to which FSDP2 was applied. Shards are cast to the dtype of compute first,
    and their scale is that of what is gathered, so the bits are those of a weight that is gathered
    and then rounded. Scales are found before each forward, in one reduction for all weights that
    are not gathered yet. Parameters stay what FSDP2 made of them. Rowwise weights are left
    out: backward needs scales of their columns. Where FSDP2 cannot do it, weights travel as before.
    """
    linears = [m for m in model.modules() if isinstance(m, Float8Linear) and _has_one_scale(m)]
    if not linears:
        return
    if reason := _why_not(parallelism):
        logger.info("float8: weights are gathered in %s, for %s", mp_policy.param_dtype, reason)
        return
    for linear in linears:
        linear.is_gathered_in_float8 = True
    group = fsdp_mesh.get_group(fsdp_mesh.ndim - 1)
    scales: dict[nn.Module, torch.Tensor] = {}

    @torch.no_grad()
    def find_scales(model: nn.Module, inputs: tuple[Any, ...]) -> None:
        sharded = [
            linear for linear in linears if not isinstance(local_part(linear.weight), Float8Weight)
        ]
        if not sharded:
            return
        shards = [_held(linear.weight) for linear in sharded]
        amaxes = torch.stack(foreach("norm", [_not_empty(s) for s in shards], torch.inf))
        amaxes = _compute(amaxes, mp_policy)
        dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=group)
        scales.update(zip(sharded, scale_of(amaxes, E4M3), strict=True))
        for shard in shards:
            # FSDP2 looks for these two in the shards; loading may have put others in their place.
            cast(Any, shard).fsdp_pre_all_gather = pre_all_gather
            cast(Any, shard).fsdp_post_all_gather = _post_all_gather

    def pre_all_gather(
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[torch.Tensor], torch.Tensor]:
        """What this rank sends, and what ``_post_all_gather`` is given besides."""
        shard, scale = cast(DTensor, module.weight).to_local(), scales[module]
        rounded = round_to(_compute(shard, mp_policy), scale, E4M3).view(torch.uint8)
        # All ranks send as many rows as the first. If columns are sharded, none are missing.
        missing = -(-outer_size[0] // mesh.size()) - len(rounded)
        return (F.pad(rounded, (0, 0, 0, missing)) if missing > 0 else rounded,), scale

    # Before FSDP2's own hook, in which its streams wait for what was done until then.
    model.register_forward_pre_hook(find_scales, prepend=True)
    logger.info("float8: %d weights are rounded before they are gathered", len(linears))


def _post_all_gather(
    outputs: tuple[torch.Tensor],
    scale: torch.Tensor,
    dtype: torch.dtype,
    *,
    out: torch.Tensor | None = None,
) -> tuple[Float8Weight, tuple[()]] | None:
    """The weight; ``out`` is that of an earlier gather, whose memory was filled again."""
    if out is None:
        return Float8Weight(outputs[0].view(E4M3), scale, dtype), ()
    # Under tensor parallel a part of the weight.
    cast(Float8Weight, _held(out)).scale = scale
    return None


def _held(tensor: torch.Tensor) -> torch.Tensor:
    """What a DTensor holds; any other tensor itself."""
    if isinstance(tensor, DTensor):
        return cast(torch.Tensor, find(LOCAL_TENSOR).__get__(tensor))
    return tensor


def gathered_in_float8(model: nn.Module) -> int:
    """How many of the model's parameters are gathered in float8, over all ranks."""
    linears = (module for module in model.modules() if isinstance(module, Float8Linear))
    return sum(linear.weight.numel() for linear in linears if linear.is_gathered_in_float8)


def _has_one_scale(linear: Float8Linear) -> bool:
    # On a single rank, weights may be plain tensors, which nothing gathers.
    return not linear.recipe.is_rowwise and isinstance(linear.weight, DTensor)


def _why_not(parallelism: Parallelism) -> str:
    if not all(map(find, NEEDED)):
        return f"torch {torch.__version__}, which lacks what that needs"
    if parallelism.fsdp_cpu_offload:
        return "fsdp_cpu_offload gathers copies of the shards"
    if isinstance(parallelism.fsdp_reshard_after_forward, int):
        return "fsdp_reshard_after_forward gathers them again from what they became"
    if stages_per_rank(parallelism) > 1:
        return "schedules of several stages on a rank gather them before forward begins"
    return ""


def _compute(x: torch.Tensor, mp_policy: MixedPrecisionPolicy) -> torch.Tensor:
    """x rounded to the dtype of compute, as float32."""
    assert mp_policy.param_dtype is not None
    return x.to(mp_policy.param_dtype).to(torch.float32)


def _not_empty(shard: torch.Tensor) -> torch.Tensor:
    return shard if shard.numel() else shard.new_zeros(1)
