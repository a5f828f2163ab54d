"""RMSNorm (arXiv 1910.07467), in few passes over memory on CPUs, where PyTorch has no kernel."""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F


class RMSNorm(nn.RMSNorm):
    """x (..., d) divided by its root mean square, times the weight (d,); in float32 at least."""

    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As ``F.rms_norm`` over the last dim, with the same bits in forward; backward rounds once to
    x's dtype, where ``F.rms_norm`` rounds several times."""
    # A compiler makes one kernel by itself; a DTensor is not a plain tensor.
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
        of_weight = (gradient * normed).flatten(0, -2).sum(0)
        gradient = gradient * weight.to(scale.dtype)
        along = (gradient * normed).mean(-1, keepdim=True)
        of_x = gradient.addcmul_(normed, along, value=-1).mul_(scale)
        return of_x.to(x.dtype), of_weight.to(weight.dtype), None
