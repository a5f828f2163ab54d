"""The gradient norm is at least float32, and clipping equals PyTorch's."""

import pytest
import torch
import torch.nn as nn

from optim.grad_norm import clip_grad_norm_


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_norm_is_at_least_float32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(300, 100, dtype=dtype)) for _ in range(4)]
    for parameter in parameters:
        parameter.grad = torch.randn(300, 100, generator=generator).to(dtype)
    grads = [parameter.grad.double().clone() for parameter in parameters]
    want = torch.stack([grad.norm() for grad in grads]).norm()
    norm = clip_grad_norm_(parameters, 1.0)
    assert norm.dtype == torch.promote_types(dtype, torch.float32)
    assert norm.double().item() == pytest.approx(want.item(), rel=1e-5)
    for parameter, grad in zip(parameters, grads, strict=True):
        assert parameter.grad.dtype == dtype
        torch.testing.assert_close(
            parameter.grad.double(), grad / want, rtol=max(torch.finfo(dtype).eps, 1e-6), atol=0.0
        )


@pytest.mark.parametrize("scale", [0.0, 1e-6, 1e-3, 1e3])
def test_clipping_equals_pytorch(scale: float) -> None:
    """Also for norms below the epsilon of the division, and below ``max_norm``."""
    generator = torch.Generator().manual_seed(0)
    params, expected = (
        [nn.Parameter(torch.zeros(5, 3).double()) for _ in range(2)] for _ in range(2)
    )
    for one, other in zip(params, expected, strict=True):
        one.grad = scale * torch.randn(5, 3, generator=generator, dtype=torch.float64)
        other.grad = one.grad.clone()
    want = nn.utils.clip_grad_norm_(expected, max_norm=1e-3)
    torch.testing.assert_close(clip_grad_norm_(params, 1e-3), want, rtol=1e-14, atol=0.0)
    for one, other in zip(params, expected, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-14, atol=0.0)
