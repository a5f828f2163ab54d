"""Experts' products by one kernel for all of them, on GPUs where that kernel is right."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn as nn
import torch.nn.functional as F

from runtime.kernel_check import check_kernel
from runtime.log import logger

# Tokens for each expert. On Blackwell, as of PyTorch 2.13, gradients of experts without tokens are
# whatever was in memory (pytorch/pytorch#172439, whose sizes are like these).
COUNTS = (162, 0, 1283, 446, 0, 83)


def avoid_wrong_grouped_mm(moes: list[nn.Module], *, dtype: torch.dtype | None) -> None:
    """Have each module's ``experts`` multiply one by one if this GPU's kernel for all at once
    fails, or gives other results, with bfloat16 weights of their size. Mutates the modules.

    Experts without ``is_grouped``, a model family's own, are left alone.
    """
    experts = [cast(Any, moe.experts) for moe in moes if hasattr(moe.experts, "is_grouped")]
    if dtype != torch.bfloat16 or not experts:
        return
    try:
        check_grouped_mm(experts[0].w1.shape[1:], device="cuda")
    # A missing kernel may raise anything; one by one computes the same, only slower.
    except Exception as error:
        logger.warning("experts: multiplied one by one, for grouped_mm failed here: %s", error)
        for module in experts:
            module.is_grouped = False
    else:
        logger.info("experts: multiplied by grouped_mm in %d layers", len(experts))


def check_grouped_mm(
    shape: torch.Size, *, device: str, grouped_mm: Callable[..., torch.Tensor] = F.grouped_mm
) -> None:
    """Raise ``ArithmeticError`` unless it multiplies each group by its own weights (h, d)."""
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
