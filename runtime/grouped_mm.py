"""All experts' products as one kernel, where it is right: not on every GPU it is."""

from typing import Any, cast

import torch
import torch.nn as nn
import torch.nn.functional as F

from runtime.kernels import Kernel, check_kernel
from runtime.log import logger

# Groups of nothing among them: on Blackwell their gradients are whatever was in memory, as of
# PyTorch 2.13 (pytorch/pytorch#172439).
COUNTS = (162, 0, 1283, 446, 0, 83)


def avoid_wrong_grouped_mm(moes: list[nn.Module], *, dtype: torch.dtype | None) -> None:
    """Have ``experts`` of each module multiply one by one if this GPU's kernel for all of them
    fails, or differs from that, with weights of their size in bfloat16. Mutates the modules."""
    if dtype != torch.bfloat16:
        return
    experts = [cast(nn.Module, moe.experts) for moe in moes]
    try:
        check_grouped_mm(next(experts[0].parameters()).shape[1:], device="cuda")
    # A kernel that cannot be had tells so in its own way; what computes the same is slower.
    except Exception as error:
        logger.warning("experts: multiplied one by one, for grouped_mm failed here: %s", error)
        for module in experts:
            cast(Any, module).is_grouped = False


def check_grouped_mm(shape: torch.Size, *, device: str, grouped_mm: Kernel = F.grouped_mm) -> None:
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
