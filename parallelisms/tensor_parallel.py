"""Tensor parallel with sequence parallel between the matrices (arXiv 2205.05198)."""

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from parallelisms.shared_parameters import keep_shared
from runtime.log import logger


def apply_tensor_parallel(
    model: nn.Module, tp_mesh: DeviceMesh, *, plan: dict[str, ParallelStyle]
) -> None:
    """Shard ``model`` over the 1-D ``tp_mesh`` as ``plan`` says. Mutates ``model``.

    Raises ``ValueError`` if the plan leaves a parameter out.
    """
    with keep_shared(model):
        parallelize_module(model, tp_mesh, plan)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(_settle)
    missed = [fqn for fqn, p in model.named_parameters() if not isinstance(p, DTensor)]
    if missed:
        raise ValueError(f"the tensor parallel plan does not cover {missed}")
    count = len(list(model.parameters()))
    logger.info("tensor parallel: %d plan entries cover %d parameters on %d ranks",
                len(plan), count, tp_mesh.size())  # fmt: skip


def _settle(module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    """Wait for the embedding's reduction. A compiled block would drop the gradient of an input
    that is still being communicated: the embedding would not learn, and nothing would say so."""
    return output.clone()
