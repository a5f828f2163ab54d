"""Training FLOPs per token from the model's shapes, and peak FLOP/s of known GPUs."""

from collections.abc import Iterable
from typing import cast

import torch
import torch.nn as nn

from runtime.devices import bfloat16_tflops


def flops_per_token(
    model: nn.Module,
    *,
    n_attentions: int,
    n_heads: int,
    head_dim: int,
    seq_len: int,
    delta_nets: Iterable[nn.Module] = (),
) -> tuple[float, float]:
    """Return training FLOPs per token without recomputation: (PaLM's convention, causal).

    6 per matmul parameter of the whole ``model``, and 12 * n_heads * head_dim * seq_len per
    attention layer (arXiv 2204.02311, appendix B); a causal mask needs half of the latter. 18 per
    element of the gated delta nets' states: each token reads a state twice and writes it once,
    whatever the chunk size of the kernel.
    """
    state_size = sum(cast(int, net.state_size) for net in delta_nets)
    linear = 6.0 * matmul_parameters(model) + 18.0 * state_size
    attention = 12.0 * n_attentions * n_heads * head_dim * seq_len
    return linear + attention, linear + attention / 2


def matmul_parameters(model: nn.Module) -> int:
    """Count the parameters in a token's matmuls: all linear layers, also a tied output, and the
    top-k experts."""
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    shares = [
        getattr(m, "active_share", 0.0) * sum(p.numel() for p in m.parameters(recurse=False))
        for m in model.modules()
    ]
    return linear + round(sum(shares))


def peak_flops(device: torch.device, given_tflops: float | None) -> float | None:
    """Return peak bfloat16 FLOP/s of one device: as given, else of a known GPU, else None."""
    if given_tflops is None and device.type == "cuda":
        given_tflops = bfloat16_tflops(torch.cuda.get_device_name(device))
    return None if given_tflops is None else given_tflops * 1e12
