"""Where Qwen3-Next may be cut."""

from dataclasses import replace
from typing import cast

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from models.gated_delta_net import GatedDeltaNet
from models.model_spec import Style
from models.qwen3_moe_sharding import PIECES, moes
from models.qwen3_moe_sharding import tensor_parallel_plan as moe_plan
from models.qwen3_next import FLAVORS, GatedAttention, Qwen3Next, Qwen3NextArgs, Qwen3NextBlock
from models.qwen3_next_hugging_face import HUGGING_FACE
from models.transformer_sharding import LocalParameters, transformer_spec


def tensor_parallel_plan(args: Qwen3NextArgs) -> dict[str, Style]:
    """Attention as in the dense decoder, gated delta nets by key heads; the shared expert, like all
    experts, for this rank's part of the sequence."""
    # Its attention always has norms of q and k; its gate is a part of ``wq``.
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
    return {
        "": spread_delta_net,
        ".wqkvz": ColwiseParallel(),
        ".wba": ColwiseParallel(),
        # One weight for all heads.
        ".norm": LocalParameters(Replicate()),
        ".wo": RowwiseParallel(output_layouts=Shard(1)),
    }


def spread_delta_net(module: nn.Module, tp_mesh: DeviceMesh) -> None:
    """Gather x along the sequence, and shard the module's own parameters by heads."""
    LocalParameters(Shard(0))(module, tp_mesh)
    gather = PrepareModuleInput(
        input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
    )
    parallelize_module(module, tp_mesh, gather)


def mixers(model: Qwen3Next) -> list[nn.Module]:
    """The attention or gated delta net of each layer."""
    return [cast(Qwen3NextBlock, block).attention for block in model.layers.values()]


def attentions(model: Qwen3Next) -> list[nn.Module]:
    return [mixer for mixer in mixers(model) if isinstance(mixer, GatedAttention)]


def delta_nets(model: Qwen3Next) -> list[nn.Module]:
    return [mixer for mixer in mixers(model) if isinstance(mixer, GatedDeltaNet)]


SPEC = replace(
    transformer_spec(FLAVORS, HUGGING_FACE),
    model_cls=Qwen3Next,
    tensor_parallel_plan=tensor_parallel_plan,
    attentions=attentions,
    delta_nets=delta_nets,
    moes=moes,
    pieces=PIECES | {"feed_forward.mix_shared": True},
)
