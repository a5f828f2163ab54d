"""Tensor parallel with sequence parallel between the matrices (arXiv 2205.05198)."""

import fnmatch
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from parallelisms.shared_parameters import keep_shared
from runtime.log import logger


def apply_tensor_parallel(
    model: nn.Module, tp_mesh: DeviceMesh, *, plan: dict[str, ParallelStyle], is_async: bool
) -> None:
    """Shard ``model`` over the 1-D ``tp_mesh`` as ``plan`` says. Mutates ``model``.

    A pipeline stage may lack modules that the plan names. ``is_async``: the compiler cuts matrix
    products into parts that it overlaps with their collectives. Raises ``ValueError`` if the plan
    leaves a parameter out.
    """
    if is_async:
        _enable_async(tp_mesh)
    names = [name for name, _ in model.named_modules()]
    plan = {path: style for path, style in plan.items() if fnmatch.filter(names, path)}
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


def _enable_async(tp_mesh: DeviceMesh) -> None:
    """Let inductor fuse gathers and scatters with matrix products, through symmetric memory."""
    import torch._inductor.config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    torch._inductor.config._micro_pipeline_tp = True
    enable_symm_mem_for_group(tp_mesh.get_group().group_name)


def _settle(module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    """Wait for the embedding's reduction. A compiled block would drop the gradient of an input
    that is still being communicated: the embedding would not learn, and nothing would say so."""
    return output.clone()
