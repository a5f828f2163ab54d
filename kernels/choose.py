"""Kernel selection: the fastest kernels that are installed and pass a numerics check."""

import torch
import torch.nn as nn

from kernels.block_attention import apply_block_attention
from kernels.flex_attention import apply_flex_attention
from kernels.float32_matmul import choose_float32_matmul
from kernels.fused_delta_rule import apply_fused_delta_rule
from kernels.grouped_mm import disable_broken_grouped_mm


def choose_kernels(
    device: torch.device,
    *,
    attentions: list[nn.Module],
    moes: list[nn.Module],
    delta_nets: list[nn.Module],
    dtype: torch.dtype | None,
    heads: tuple[int, int],
    head_dim: int,
    wants_flex_attention: bool,
    n_ranks: int,
) -> None:
    """Check each kernel, and use those that match the reference on all ranks' GPUs. Collective.

    Mutates the modules and PyTorch's settings. ``dtype``: compute dtype. ``heads``: numbers of
    query and of key heads, sharded over ``n_ranks``.
    """
    if device.type == "cpu":
        has_fast_float32 = choose_float32_matmul()
        apply_block_attention(
            attentions, has_fast_float32=has_fast_float32, heads=heads, head_dim=head_dim
        )
        return
    if wants_flex_attention:
        apply_flex_attention(attentions, dtype=dtype, heads=heads, head_dim=head_dim)
    disable_broken_grouped_mm(moes, device=device, dtype=dtype)
    apply_fused_delta_rule(delta_nets, dtype=dtype, n_ranks=n_ranks)
