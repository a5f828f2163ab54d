"""Embedding whose gradient is summed in float32, as PyTorch does it on GPUs only."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Embedding(nn.Embedding):
    """Rows of ``weight`` (vocab_size, d) for tokens (b, s): (b, s, d)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return embedding(input, self.weight)


def embedding(tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Look up tokens (b, s) in weight (vocab_size, d).

    On CPUs PyTorch adds up a token's gradients one by one in the dtype of ``weight``: in bfloat16
    a sum loses what is below a relative 2^-8 of it, 5 % of the gradient of a frequent token.
    """
    # Plans run on fake tensors of the CPU, and are of a GPU.
    is_real = type(weight) in (torch.Tensor, nn.Parameter)
    is_trained = weight.requires_grad and torch.is_grad_enabled()
    if is_trained and is_real and weight.is_cpu and weight.dtype == torch.bfloat16:
        return F.embedding(tokens, weight.float()).to(weight.dtype)
    return F.embedding(tokens, weight)
