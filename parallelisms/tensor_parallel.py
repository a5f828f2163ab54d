"""Tensor parallel with sequence parallel between the matrices (arXiv 2205.05198)."""

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from parallelisms.shared_parameters import keep_shared
from runtime.compat import configure, require
from runtime.log import logger

Style = ParallelStyle | Callable[[nn.Module, DeviceMesh], object]
"""How a module is spread: by PyTorch's style, or by a function that mutates it."""


def apply_tensor_parallel(
    model: nn.Module, tp_mesh: DeviceMesh, *, plan: Mapping[str, Style], is_async: bool
) -> None:
    """Shard ``model`` over the 1-D ``tp_mesh`` as ``plan`` says. Mutates ``model``.

    A pipeline stage may lack modules that the plan names. ``is_async``: the compiler cuts matrix
    products into parts that it overlaps with their collectives. Raises ``ValueError`` if the plan
    leaves a parameter out.
    """
    if is_async:
        _enable_async(tp_mesh)
    modules, n_entries = dict(model.named_modules()), 0
    with keep_shared(model):
        for path, style in plan.items():
            found = [module for name, module in modules.items() if _is_at(name, path)]
            n_entries += bool(found)
            for module in found:
                if isinstance(style, ParallelStyle):
                    parallelize_module(module, tp_mesh, style)
                else:
                    style(module, tp_mesh)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(_settle)
    missed = [fqn for fqn, p in model.named_parameters() if not isinstance(p, DTensor)]
    if missed:
        raise ValueError(f"the tensor parallel plan does not cover {missed}")
    count = len(list(model.parameters()))
    logger.info("tensor parallel: %d plan entries cover %d parameters on %d ranks",
                n_entries, count, tp_mesh.size())  # fmt: skip


def _is_at(name: str, path: str) -> bool:
    """Whether a module of that ``name`` is at ``path``, between whose dots there are patterns."""
    parts, patterns = name.split("."), path.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _enable_async(tp_mesh: DeviceMesh) -> None:
    """Let inductor fuse gathers and scatters with matrix products, through symmetric memory."""
    key = "parallelism.tensor_parallel_async"
    configure("torch._inductor.config:_micro_pipeline_tp", True, key=key)
    enable = require("torch.distributed._symmetric_memory:enable_symm_mem_for_group", key=key)
    enable(tp_mesh.get_group().group_name)


def _settle(module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    """Wait for the embedding's reduction. A compiled block would drop the gradient of an input
    that is still being communicated: the embedding would not learn, and nothing would say so."""
    return output.clone()
