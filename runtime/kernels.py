"""Which kernels compute a model on this device: the fastest that are there and compute right."""

import torch
import torch.nn as nn

from runtime.block_attention import use_block_attention
from runtime.flex_attention import use_flex_attention
from runtime.fused_delta_rule import use_fused_delta_rule
from runtime.grouped_mm import avoid_wrong_grouped_mm
from runtime.matmul import choose_float32_matmul


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
    """Try each kernel on this device; where it computes the same, have the modules use it.

    ``dtype``: of compute. ``heads``: of queries and of keys, which ``n_ranks`` share.
    Mutates the modules and PyTorch's settings.
    """
    if device.type == "cpu":
        has_fast_float32 = choose_float32_matmul()
        use_block_attention(
            attentions, has_fast_float32=has_fast_float32, heads=heads, head_dim=head_dim
        )
        return
    if wants_flex_attention:
        use_flex_attention(attentions, dtype=dtype, heads=heads, head_dim=head_dim)
    avoid_wrong_grouped_mm(moes, dtype=dtype)
    use_fused_delta_rule(delta_nets, dtype=dtype, n_ranks=n_ranks)
