"""Sharding of Qwen3-Next."""

from dataclasses import replace
from typing import cast

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel

from models.gated_delta_net import GatedDeltaNet
from models.model_spec import Style
from models.qwen3_moe_sharding import COMPILE_REGIONS, moes
from models.qwen3_moe_sharding import tensor_parallel_plan as moe_plan
from models.qwen3_next import FLAVORS, GatedAttention, Qwen3Next, Qwen3NextArgs, Qwen3NextBlock
from models.qwen3_next_hugging_face import HUGGING_FACE
from models.transformer_sharding import (
    LocalParameters,
    gather_sequence,
    rowwise_to_sequence,
    transformer_spec,
)


def tensor_parallel_plan(args: Qwen3NextArgs) -> dict[str, Style]:
    """Attention as in the dense decoder, Gated DeltaNet sharded by key heads.

    The shared expert, like all experts, computes this rank's sequence shard.
    """
    # Attention always has q and k norms; its gate is part of ``wq``.
    plan = moe_plan(replace(args, qk_norm=True))
    head, attention = "layers.*.attention", {}
    for path in [path for path in plan if path == head or path.startswith(f"{head}.")]:
        attention[path.removeprefix(head)] = plan.pop(path)
    for path in ("shared_gate", "shared.w[123]"):
        plan[f"layers.*.feed_forward.{path}"] = LocalParameters(Replicate())
    for layer in range(args.n_layers):
        styles = attention if args.has_attention(layer) else delta_net_plan()
        plan |= {f"layers.{layer}.attention{path}": style for path, style in styles.items()}
    return plan


def delta_net_plan() -> dict[str, Style]:
    """Return the plan of one Gated DeltaNet, relative to its FQN."""
    return {
        "": shard_delta_net,
        ".wqkvz": ColwiseParallel(),
        ".wba": ColwiseParallel(),
        # All heads share this weight.
        ".norm": LocalParameters(Replicate()),
        ".wo": rowwise_to_sequence,
    }


def shard_delta_net(module: nn.Module, tp_mesh: DeviceMesh) -> None:
    """Shard the module's direct parameters by heads; all-gather its input along the sequence."""
    LocalParameters(Shard(0))(module, tp_mesh)
    gather_sequence(module, tp_mesh)


def token_mixers(model: Qwen3Next) -> list[nn.Module]:
    """Return each layer's attention or Gated DeltaNet."""
    return [cast(Qwen3NextBlock, block).attention for block in model.layers.values()]


def attentions(model: Qwen3Next) -> list[nn.Module]:
    """Return the attention modules of the layers that have one."""
    return [mixer for mixer in token_mixers(model) if isinstance(mixer, GatedAttention)]


def delta_nets(model: Qwen3Next) -> list[nn.Module]:
    """Return the Gated DeltaNets of the layers that have one."""
    return [mixer for mixer in token_mixers(model) if isinstance(mixer, GatedDeltaNet)]


SPEC = replace(
    transformer_spec(FLAVORS, HUGGING_FACE),
    model_cls=Qwen3Next,
    tensor_parallel_plan=tensor_parallel_plan,
    attentions=attentions,
    delta_nets=delta_nets,
    moes=moes,
    compile_regions=COMPILE_REGIONS | {"feed_forward.apply_shared_expert": True},
)
