"""Where the dense decoder may be cut: facts about its FQNs and heads."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from models.hugging_face import HuggingFace
from models.model_spec import ModelSpec, Style
from models.transformer import Transformer, TransformerArgs, TransformerBlock


def transformer_spec(
    flavors: Mapping[str, TransformerArgs], hugging_face: HuggingFace | None = None
) -> ModelSpec:
    return ModelSpec(
        model_cls=Transformer,
        flavors=flavors,
        tensor_parallel_plan=tensor_parallel_plan,
        fsdp_units=fsdp_units,
        blocks=blocks,
        attentions=attentions,
        delta_nets=lambda model: [],
        moes=lambda model: [],
        cut_stage=cut_stage,
        join_stages=join_stages,
        hugging_face=hugging_face,
    )


def tensor_parallel_plan(args: TransformerArgs) -> dict[str, Style]:
    """Tensor parallel inside attention and feed-forward, sequence parallel between them.

    Megatron-LM's scheme (arXiv 2205.05198), in PyTorch's ``ParallelStyle`` by FQN pattern.
    Complete: every parameter of the model is under some entry. The logits stay sharded over the
    vocabulary, also in the loss.
    """
    plan: dict[str, Style] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.attention": PrepareModuleInput(
            # x is gathered along the sequence; rope and document_ids are whole on every rank.
            input_layouts=(Shard(1), None, None),
            desired_input_layouts=(Replicate(), None, None),
        ),
        "layers.*.attention.wq": ColwiseParallel(),
        "layers.*.attention.w[kv]": HeadParallel(args.n_kv_heads),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.ffn_norm": SequenceParallel(),
        "layers.*.feed_forward": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
        "layers.*.feed_forward.w[13]": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    if args.qk_norm:
        # Sharded over heads, dim 2 of (b, s, h, k), so that their gradients are summed.
        head_norm = SequenceParallel(sequence_dim=2, use_local_output=True)
        plan["layers.*.attention.[qk]_norm"] = head_norm
    return plan


@dataclass(frozen=True)
class HeadParallel:
    """Column-wise, by heads. Each rank gets the heads that its queries attend to. Where ranks
    do not divide the heads, the weight is sharded all the same, and its output gathered."""

    n_heads: int

    def __call__(self, module: nn.Module, tp_mesh: DeviceMesh) -> None:
        parallelize_module(module, tp_mesh, ColwiseParallel(use_local_output=False))
        rank, degree = tp_mesh.get_local_rank(), tp_mesh.size()

        def keep(module: nn.Module, inputs: tuple[Any, ...], output: DTensor) -> torch.Tensor:
            return output.to_local()

        def gather(module: nn.Module, inputs: tuple[Any, ...], output: DTensor) -> torch.Tensor:
            # A rank's queries use some of the heads: gradients are parts of a sum.
            whole = output.redistribute(placements=[Replicate()])
            heads = whole.to_local(grad_placements=[Partial()]).unflatten(-1, (self.n_heads, -1))
            copies = math.lcm(self.n_heads, degree) // self.n_heads
            own = heads.repeat_interleave(copies, dim=-2).chunk(degree, dim=-2)[rank]
            return own.flatten(-2)

        module.register_forward_hook(keep if self.n_heads % degree == 0 else gather)


@dataclass(frozen=True)
class LocalParameters:
    """Spread the parameters of a module that computes with its ``own_part`` of them."""

    placement: Placement

    def __call__(self, module: nn.Module, tp_mesh: DeviceMesh) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            spread = distribute_tensor(parameter, tp_mesh, [self.placement], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(spread))


def fsdp_units(model: Transformer) -> list[list[nn.Module]]:
    """One unit per block; the last norm and the output share one, with the embedding if tied."""
    first: list[nn.Module] = [] if model.tok_embeddings is None else [model.tok_embeddings]
    blocks = [[block] for block in model.layers.values()]
    last: list[nn.Module] = [m for m in (model.norm, model.output) if m is not None]
    if first and last and model.args.tie_embeddings:
        # A parameter belongs to one unit: modules that share one are gathered together.
        return [*blocks, [*first, *last]]
    return [unit for unit in (first, *blocks, last) if unit]


def blocks(model: Transformer) -> nn.ModuleDict:
    return model.layers


def attentions(model: Transformer) -> list[nn.Module]:
    return [cast(TransformerBlock, block).attention for block in model.layers.values()]


def cut_stage(model: Transformer, layers: range) -> None:
    """Keep only what the pipeline stage of these ``layers`` has. Mutates ``model``.

    The first stage has the embedding, the last one norm and output.
    """
    for name in list(model.layers):
        if int(name) not in layers:
            del model.layers[name]
    if layers.start > 0:
        model.tok_embeddings = None
    if layers.stop < model.args.n_layers:
        model.norm = model.output = None


def join_stages(model: Transformer, stages: list[Transformer]) -> None:
    """Let ``model`` hold, under its own names, what these stages of it have. Mutates ``model``."""
    held = {name: block for stage in stages for name, block in stage.layers.items()}
    model.layers = nn.ModuleDict(held)
    for stage in stages:
        # Its buffer needs memory, which only ``model`` is given.
        stage.rope = model.rope
    embeddings = model.tok_embeddings
    for name in ("tok_embeddings", "norm", "output"):
        found = [child for stage in stages if (child := getattr(stage, name)) is not None]
        setattr(model, name, found[0] if found else None)
    if model.args.tie_embeddings and model.output is not None and model.tok_embeddings is None:
        # A tied weight goes by its name in the embedding, on the last stage too.
        assert embeddings is not None
        embeddings.weight = model.output.weight
        model.tok_embeddings = embeddings
