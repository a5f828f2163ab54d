"""Tensor parallelism, with sequence parallelism between the matmuls (arXiv 2205.05198)."""

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from parallelisms.tied_weights import preserve_tied_weights
from runtime.compat import require
from runtime.log import logger

Style = ParallelStyle | Callable[[nn.Module, DeviceMesh], object]
"""PyTorch's style for a module, or a function that shards the module in place."""


def apply_tensor_parallel(
    model: nn.Module, tp_mesh: DeviceMesh, *, plan: Mapping[str, Style], is_async: bool
) -> None:
    """Shard ``model`` over the 1-D ``tp_mesh`` by ``plan``. Mutates ``model``.

    ``plan`` maps module paths, in which ``*`` matches within a name, to styles. It may name modules
    that a pipeline stage lacks. ``is_async``: compiled blocks may split matmuls to overlap these
    with their collectives. Raises ``ValueError`` if ``plan`` does not cover a parameter, or
    PyTorch has no such style of a module.
    """
    if is_async:
        _enable_async(tp_mesh)
    modules, n_entries = dict(model.named_modules()), 0
    with preserve_tied_weights(model):
        for path, style in plan.items():
            found = [module for name, module in modules.items() if _matches(name, path)]
            n_entries += bool(found)
            for module in found:
                _apply(path, style, module, tp_mesh)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(_wait_for_reduction)
    missed = [fqn for fqn, p in model.named_parameters() if not isinstance(p, DTensor)]
    if missed:
        raise ValueError(f"the tensor parallel plan does not cover {', '.join(missed)}")
    count = len(list(model.parameters()))
    logger.info("tensor parallel: %d plan entries cover %d parameters on %d ranks",
                n_entries, count, tp_mesh.size())  # fmt: skip


def warn_if_unmatched(model: nn.Module, plan: Mapping[str, Style]) -> None:
    """Log the entries of ``plan`` that match no module of ``model``, which is still whole."""
    names = [name for name, _ in model.named_modules()]
    for path in plan:
        if not any(_matches(name, path) for name in names):
            logger.warning("tensor parallel plan: no module matches %r", path)


def _apply(path: str, style: Style, module: nn.Module, tp_mesh: DeviceMesh) -> None:
    try:
        if isinstance(style, ParallelStyle):
            parallelize_module(module, tp_mesh, style)
        else:
            style(module, tp_mesh)
    except NotImplementedError as error:
        text = f"{path!r} of the tensor parallel plan is a {type(module).__name__}"
        raise ValueError(f"{text}: {error}") from error


def _matches(name: str, path: str) -> bool:
    """True if a module's ``name`` matches ``path``, each of whose parts is a pattern."""
    parts, patterns = name.split("."), path.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _enable_async(tp_mesh: DeviceMesh) -> None:
    """Enable symmetric memory, through which inductor fuses matmuls with their collectives."""
    key = "parallelism.tensor_parallel_async"
    require("torch._inductor.config:_micro_pipeline_tp", key=key)
    enable = require("torch.distributed._symmetric_memory:enable_symm_mem_for_group", key=key)
    enable(tp_mesh.get_group().group_name)


def _wait_for_reduction(
    module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor
) -> torch.Tensor:
    """Wait for the embedding's reduce-scatter, which PyTorch's styles leave pending.

    A compiled block silently drops the gradient of an input that is still being communicated, so
    the embedding would not learn. Of a view, which a style may return, FSDP2 warns.
    """
    return output.clone()
