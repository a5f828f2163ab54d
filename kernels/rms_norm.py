"""RMSNorm (arXiv 1910.07467) with few memory passes on CPUs, where PyTorch has no fused kernel."""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F


class RMSNorm(nn.RMSNorm):
    """x (..., d) over its root mean square, times weight (d,); computes in float32 or more."""

    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of x (..., d) over its last dim, weight (d,).

    Forward equals ``F.rms_norm`` bit for bit; backward rounds to x's dtype once instead of often.
    """
    # torch.compile fuses F.rms_norm, and DTensors need it for dispatch.
    if x.is_cpu and type(x) is torch.Tensor and not torch.compiler.is_compiling():
        return _RMSNorm.apply(x, weight, eps)
    precise = torch.promote_types(x.dtype, weight.dtype)
    return F.rms_norm(x.to(precise), weight.shape, weight, eps).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        precise = torch.promote_types(x.dtype, torch.float32)
        wide = x.to(precise)
        scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight.to(precise)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normed, gradient = x.to(scale.dtype) * scale, gradients[0].to(scale.dtype)
        grad_weight = (gradient * normed).flatten(0, -2).sum(0)
        gradient = gradient * weight.to(scale.dtype)
        projection = (gradient * normed).mean(-1, keepdim=True)
        grad_x = gradient.addcmul_(normed, projection, value=-1).mul_(scale)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None
