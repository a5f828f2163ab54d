"""Training FLOPs per token from the model's shapes, and peak FLOP/s of known GPUs."""

from collections.abc import Iterable
from typing import cast

import torch
import torch.nn as nn

# Dense bfloat16 TFLOP/s from the vendors' data sheets. The first key that the device's name
# contains counts.
PEAK_TFLOPS = {
    "H200 NVL": 835.0,
    "H200": 989.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H800": 989.0,
    "GB200": 2500.0,
    "GB300": 2500.0,
    "B200": 2250.0,
    "B300": 2250.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "MI300X": 1307.0,
}


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
    """Return peak FLOP/s of one device: as given, else from ``PEAK_TFLOPS``, else None."""
    if given_tflops is not None:
        return given_tflops * 1e12
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peaks = [peak for part, peak in PEAK_TFLOPS.items() if part in name]
    return peaks[0] * 1e12 if peaks else None
