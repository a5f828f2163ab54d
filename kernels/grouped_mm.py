"""Numerics check of grouped_mm: some GPUs compute wrong results."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn as nn
import torch.nn.functional as F

from kernels.kernel_check import assert_kernel_matches, problem_on_any_rank
from runtime.log import logger

# Tokens per expert. On Blackwell, as of PyTorch 2.13, gradients of experts without tokens are
# uninitialized memory (pytorch/pytorch#172439, which has similar sizes).
TOKENS_PER_EXPERT = (162, 0, 1283, 446, 0, 83)


def disable_broken_grouped_mm(
    moes: list[nn.Module], *, device: torch.device, dtype: torch.dtype | None
) -> None:
    """Use a loop over experts if grouped_mm in bfloat16 fails or is wrong on any rank's ``device``.

    Mutates ``is_grouped`` of each module's ``experts``; skips experts without it.
    """
    found = [cast(Any, moe.experts) for moe in moes if hasattr(moe.experts, "is_grouped")]
    experts = [each for each in found if each.grouped_device_type == device.type]
    if dtype != torch.bfloat16 or not experts:
        return
    shape = experts[0].w1.shape[1:]
    problem = problem_on_any_rank(lambda: check_grouped_mm(shape, device=device.type))
    if problem:
        text = "grouped_mm failed its numerics check, using a loop over experts: %s"
        logger.warning(text, problem)
        for module in experts:
            module.is_grouped = False
    else:
        logger.info("grouped_mm: experts of %d layers", len(experts))


def check_grouped_mm(
    shape: torch.Size, *, device: str, grouped_mm: Callable[..., torch.Tensor] = F.grouped_mm
) -> None:
    """Raise ``ArithmeticError`` unless ``grouped_mm`` matches a loop over weights (h, d)."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(sum(TOKENS_PER_EXPERT), shape[1]), (len(TOKENS_PER_EXPERT), *shape)]
    inputs = [torch.randn(shape, generator=generator, device=device) for shape in shapes]
    offsets = torch.tensor(TOKENS_PER_EXPERT, device=device).cumsum(0).to(torch.int32)

    def grouped(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return grouped_mm(x, weights.transpose(-2, -1), offs=offsets)

    def looped(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        parts = zip(x.split(TOKENS_PER_EXPERT), weights, strict=True)
        return torch.cat([F.linear(part, weight) for part, weight in parts])

    assert_kernel_matches(grouped, looped, inputs)
