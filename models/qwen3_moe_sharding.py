"""Sharding of Qwen3 MoE."""

from dataclasses import replace
from typing import cast

import torch.nn as nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput

from models.model_spec import Style
from models.moe import MoE
from models.qwen3_moe import FLAVORS, HUGGING_FACE, Qwen3Moe, Qwen3MoeArgs
from models.transformer_sharding import LocalParameters, transformer_spec
from models.transformer_sharding import tensor_parallel_plan as dense_plan

# Expert token counts are data dependent, so ``apply_experts`` breaks the graph.
COMPILE_REGIONS = {"attend": True, "feed_forward.route": True, "feed_forward.apply_experts": False}


def tensor_parallel_plan(args: Qwen3MoeArgs) -> dict[str, Style]:
    """Dense decoder's plan, with MoE on each rank's sequence shard.

    Experts see tensor parallel ranks as ranks with different tokens. Expert parallel has already
    sharded their weights.
    """
    plan = {path: style for path, style in dense_plan(args).items() if "feed_forward" not in path}
    plan["layers.*.feed_forward"] = PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Shard(1),), use_local_output=True
    )
    plan["layers.*.feed_forward.router"] = LocalParameters(Replicate())
    return plan


def moes(model: Qwen3Moe) -> list[nn.Module]:
    """Return the MoE layers."""
    found = [cast(nn.Module, block.feed_forward) for block in model.layers.values()]
    return [module for module in found if isinstance(module, MoE)]


SPEC = replace(
    transformer_spec(FLAVORS, HUGGING_FACE),
    model_cls=Qwen3Moe,
    tensor_parallel_plan=tensor_parallel_plan,
    moes=moes,
    compile_regions=COMPILE_REGIONS,
)
