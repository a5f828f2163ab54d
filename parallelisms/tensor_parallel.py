"""Tensor parallel with sequence parallel between the matrices (arXiv 2205.05198)."""

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from runtime.log import logger


def apply_tensor_parallel(
    model: nn.Module, tp_mesh: DeviceMesh, *, plan: dict[str, ParallelStyle]
) -> None:
    """Shard ``model`` over the 1-D ``tp_mesh`` as ``plan`` says. Mutates ``model``.

    Raises ``ValueError`` if the plan leaves a parameter out.
    """
    shared = _shared_parameters(model)
    parallelize_module(model, tp_mesh, plan)
    # parallelize_module gives every module a parameter of its own: share again what was shared.
    for first, *others in shared:
        for fqn in others:
            module, name = _owner(model, fqn)
            module.register_parameter(name, model.get_parameter(first))
    missed = [fqn for fqn, p in model.named_parameters() if not isinstance(p, DTensor)]
    if missed:
        raise ValueError(f"the tensor parallel plan does not cover {missed}")
    count = len(list(model.parameters()))
    logger.info("tensor parallel: %d plan entries cover %d parameters on %d ranks",
                len(plan), count, tp_mesh.size())  # fmt: skip


def _shared_parameters(model: nn.Module) -> list[list[str]]:
    """Groups of FQNs that are one parameter."""
    names: dict[int, list[str]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(fqn)
    return [group for group in names.values() if len(group) > 1]


def _owner(model: nn.Module, fqn: str) -> tuple[nn.Module, str]:
    path, _, name = fqn.rpartition(".")
    return model.get_submodule(path), name
