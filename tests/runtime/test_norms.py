import pytest
import torch
import torch.nn as nn

from optim.grad_norm import clip_grad_norm_
from runtime.norms import PIECE, norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_all_sizes_are_those_of_float64(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = (0, 1, PIECE - 1, PIECE, PIECE + 1, 2**24)
    tensors = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    # A shard of columns.
    tensors.append(tensors[-1].view(4, -1).T)
    found = norms(tensors, torch.float32)
    wanted = [tensor.double().norm() for tensor in tensors]
    assert {each.dtype for each in found} == {torch.float32}
    torch.testing.assert_close([each.double() for each in found], wanted, rtol=1e-5, atol=0.0)


def test_large_gradients_are_clipped_to_the_norm() -> None:
    parameter = nn.Parameter(torch.empty(2**24))
    parameter.grad = torch.ones(2**24)
    norm = clip_grad_norm_([parameter], 1.0)
    assert norm.item() == pytest.approx(2**12, rel=1e-6)
    assert parameter.grad.double().norm().item() == pytest.approx(1.0, rel=1e-6)
