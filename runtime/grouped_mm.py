"""Experts' products by one kernel for all of them, on GPUs where that kernel is right."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn as nn
import torch.nn.functional as F

from runtime.kernel_check import check_kernel
from runtime.log import logger

# Tokens of experts. Gradients of those without any are whatever was in memory on Blackwell, as of
# PyTorch 2.13 (pytorch/pytorch#172439, whose sizes are like these).
COUNTS = (162, 0, 1283, 446, 0, 83)


def avoid_wrong_grouped_mm(moes: list[nn.Module], *, dtype: torch.dtype | None) -> None:
    """Have ``experts`` of each module multiply one by one if this GPU's kernel for all of them
    fails, or differs from that, with weights of their size in bfloat16. Mutates the modules.

    A family's own experts are left alone, unless they can: those have ``is_grouped``.
    """
    experts = [cast(Any, moe.experts) for moe in moes if hasattr(moe.experts, "is_grouped")]
    if dtype != torch.bfloat16 or not experts:
        return
    try:
        check_grouped_mm(experts[0].w1.shape[1:], device="cuda")
    # A kernel that cannot be had tells so in its own way; what computes the same is slower.
    except Exception as error:
        logger.warning("experts: multiplied one by one, for grouped_mm failed here: %s", error)
        for module in experts:
            module.is_grouped = False
    else:
        logger.info("experts: multiplied by grouped_mm in %d layers", len(experts))


def check_grouped_mm(
    shape: torch.Size, *, device: str, grouped_mm: Callable[..., torch.Tensor] = F.grouped_mm
) -> None:
    """Raise ``ArithmeticError`` unless it is a product for each group, weights (h, d) ``shape``."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(sum(COUNTS), shape[1]), (len(COUNTS), *shape)]
    drawn = [torch.randn(shape, generator=generator, device=device) for shape in shapes]
    offsets = torch.tensor(COUNTS, device=device).cumsum(0).to(torch.int32)

    def together(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return grouped_mm(x, weights.transpose(-2, -1), offs=offsets)

    def one_by_one(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        parts = zip(x.split(COUNTS), weights, strict=True)
        return torch.cat([F.linear(part, weight) for part, weight in parts])

    check_kernel(together, one_by_one, drawn)
