"""Tensor parallel's all-gathers in float8, of activations and gradients: half the bytes, same bits.

The method is torchao's (torchao/float8/float8_tensor_parallel.py).
"""

from typing import Any, cast

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from parallelisms.float8 import (
    E4M3,
    E5M2,
    WRAPPER_NAMES,
    Float8Linear,
    Float8Tensor,
    quantize,
    scale_from_amax,
)
from runtime.compat import find
from runtime.log import logger

SEQUENCE = Shard(1)
"""Placement of activations (b, s, d) between the modules that tensor parallel shards."""


def apply_float8_tensor_parallel(blocks: nn.ModuleDict) -> None:
    """Quantize what tensor parallel gathers along the sequence, before it does. Mutates ``blocks``.

    In forward that is the input of a module with the attribute ``all_gather_input``, if all linear
    layers that are its children and sharded by column are tensorwise ``Float8Linear``. In backward,
    the gradient of a tensorwise ``Float8Linear`` with the attribute ``reduce_scatter_output``. What
    is reduced keeps its dtype. A scale is that of the gathered tensor, for which a number is
    all-reduced, so results are bitwise those of quantizing after the gather.
    """
    gathering = [module for module in blocks.modules() if "all_gather_input" in vars(module)]
    inputs = [module for module in gathering if _is_read_in_float8(module)]
    scattering = [module for module in blocks.modules() if "reduce_scatter_output" in vars(module)]
    outputs = [module for module in scattering if _is_tensorwise(module)]
    if not inputs and not outputs:
        return
    if not all(map(find, WRAPPER_NAMES)):
        text = "float8 tensor parallel: off, torch %s lacks private names that it needs"
        logger.info(text, torch.__version__)
        return
    for module in inputs:
        cast(Any, module).all_gather_input = _gather
    for module in outputs:
        cast(Any, module).reduce_scatter_output = _scatter
    text = "float8 tensor parallel: all-gathers of %d activations and %d gradients"
    logger.info(text, len(inputs), len(outputs))


def _is_tensorwise(module: nn.Module) -> bool:
    return isinstance(module, Float8Linear) and not module.recipe.is_rowwise


def _is_read_in_float8(module: nn.Module) -> bool:
    linears = [child for child in module.children() if isinstance(child, nn.Linear)]
    by_column = [m for m in linears if cast(DTensor, m.weight).placements == (Shard(0),)]
    return bool(by_column) and all(map(_is_tensorwise, by_column))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor) -> DTensor:
        return _gathered(x, E4M3)

    @staticmethod
    def backward(ctx: Any, *gradients: DTensor) -> DTensor:
        return gradients[0].redistribute(placements=[SEQUENCE])


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: DTensor) -> DTensor:
        return out.redistribute(placements=[SEQUENCE])

    @staticmethod
    def backward(ctx: Any, *gradients: DTensor) -> DTensor:
        return _gathered(gradients[0], E5M2)


# Dynamo would trace backward with gradients like the output of forward; autograd passes others.
@torch.compiler.allow_in_graph
def _gather(x: DTensor) -> DTensor:
    return _Gather.apply(x)


@torch.compiler.allow_in_graph
def _scatter(out: DTensor) -> DTensor:
    return _Scatter.apply(out)


def _gathered(x: DTensor, dtype: torch.dtype) -> DTensor:
    """Quantize x (b, s, d), sharded along the sequence, to ``dtype`` and gather it: a DTensor of a
    ``Float8Tensor``, replicated."""
    assert x.placements == (SEQUENCE,)
    local, mesh = x.to_local(), x.device_mesh

    def redistributed(tensor: torch.Tensor, placement: Placement) -> torch.Tensor:
        shard = DTensor.from_local(tensor, mesh, [placement], run_check=False)
        return shard.redistribute(placements=[Replicate()]).to_local()

    amax = redistributed(local.to(torch.float32).abs().amax(), Partial("max"))
    scale = scale_from_amax(amax, dtype)
    # Collectives know bytes; some backends do not know float8.
    gathered = redistributed(quantize(local, scale, dtype).view(torch.uint8), SEQUENCE).view(dtype)
    whole = Float8Tensor(gathered, scale, x.dtype)
    return DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
