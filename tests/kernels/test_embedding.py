"""Gradients of embeddings are summed in float32, whatever the dtype of the weight."""

import pytest
import torch

from kernels.embedding import Embedding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradient_of_a_frequent_token_is_whole(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = Embedding(5, 32).to(dtype)
    # A bfloat16 sum of so many is 5 % off.
    tokens = torch.randint(0, 5, (4, 2048))
    out = module(tokens)
    assert torch.equal(out, module.weight[tokens])
    gradient = torch.randn(out.shape).add(0.1).to(dtype)
    out.backward(gradient)
    rows = gradient.double().flatten(0, 1)
    want = torch.zeros(5, 32, dtype=torch.float64).index_add_(0, tokens.flatten(), rows)
    error = (module.weight.grad.double() - want).norm() / want.norm()
    assert module.weight.grad.dtype == dtype
    assert error < 0.003
