"""Sharding of the dense decoder: tensor parallel plan, FSDP units, pipeline stages."""

import math
from collections.abc import Callable, Mapping
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
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from models.dtensor import VocabularyParallelEmbedding
from models.hugging_face import HuggingFace
from models.model_spec import ModelSpec, Style
from models.transformer import Transformer, TransformerArgs, TransformerBlock


def transformer_spec(
    flavors: Mapping[str, TransformerArgs], hugging_face: HuggingFace | None = None
) -> ModelSpec:
    """Build a spec of ``Transformer``; other families replace what differs."""
    return ModelSpec(
        model_cls=Transformer,
        flavors=flavors,
        tensor_parallel_plan=tensor_parallel_plan,
        fsdp_units=fsdp_units,
        blocks=blocks,
        attentions=attentions,
        delta_nets=lambda model: [],
        moes=lambda model: [],
        split_stage=split_stage,
        merge_stages=merge_stages,
        hugging_face=hugging_face,
    )


def tensor_parallel_plan(args: TransformerArgs) -> dict[str, Style]:
    """Tensor parallel inside attention and feed-forward, sequence parallel between them.

    Megatron-LM's scheme (arXiv 2205.05198), in PyTorch's ``ParallelStyle`` by FQN pattern.
    Every parameter of the model matches some entry. The logits stay sharded over the vocabulary,
    also in the loss.
    """
    plan: dict[str, Style] = {
        "tok_embeddings": vocabulary_to_sequence,
        "layers.*.attention_norm": SequenceParallel(),
        # rope and document_ids are replicated.
        "layers.*.attention": gather_sequence,
        "layers.*.attention.wq": ColwiseParallel(),
        "layers.*.attention.w[kv]": HeadParallel(args.n_kv_heads),
        "layers.*.attention.wo": rowwise_to_sequence,
        "layers.*.ffn_norm": SequenceParallel(),
        "layers.*.feed_forward": gather_sequence,
        "layers.*.feed_forward.w[13]": ColwiseParallel(),
        "layers.*.feed_forward.w2": rowwise_to_sequence,
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    if args.qk_norm:
        # Inputs are sharded over heads, dim 2 of (b, s, h, k), so weight gradients are summed.
        head_norm = SequenceParallel(sequence_dim=2, use_local_output=True)
        plan["layers.*.attention.[qk]_norm"] = head_norm
    return plan


def vocabulary_to_sequence(module: nn.Module, tp_mesh: DeviceMesh) -> None:
    """Style of an embedding: shards the vocabulary, and reduce-scatters the output (b, s, d) along
    the sequence. Raises ``NotImplementedError`` if a rank would have no rows.
    """
    n_rows, degree = cast(nn.Embedding, module).num_embeddings, tp_mesh.size()
    if -(-n_rows // degree) * (degree - 1) >= n_rows:
        raise NotImplementedError(f"its {n_rows} rows leave one of {degree} ranks without any")
    LocalParameters(Shard(0))(module, tp_mesh)
    module.__class__ = VocabularyParallelEmbedding
    cast(VocabularyParallelEmbedding, module).tp_mesh = tp_mesh


def gather_sequence(module: nn.Module, tp_mesh: DeviceMesh) -> None:
    """Style that all-gathers the module's first input (b, s, d) along the sequence.

    Float8 replaces the attribute ``all_gather_input`` that it adds.
    """

    def gather(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *others = inputs
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, tp_mesh, [Shard(1)], run_check=False)
        return cast(Any, module).all_gather_input(x), *others

    cast(Any, module).all_gather_input = _redistribute_to(Replicate())
    module.register_forward_pre_hook(gather)


def rowwise_to_sequence(module: nn.Module, tp_mesh: DeviceMesh) -> None:
    """Row-wise style of a linear layer whose output (b, s, d) is reduce-scattered along the
    sequence.

    Float8 replaces the attribute ``reduce_scatter_output`` that it adds.
    """

    def scatter(module: nn.Module, inputs: tuple[Any, ...], output: DTensor) -> torch.Tensor:
        return cast(Any, module).reduce_scatter_output(output).to_local()

    style = RowwiseParallel(output_layouts=Partial(), use_local_output=False)
    parallelize_module(module, tp_mesh, style)
    cast(Any, module).reduce_scatter_output = _redistribute_to(Shard(1))
    module.register_forward_hook(scatter)


def _redistribute_to(placement: Placement) -> Callable[[DTensor], DTensor]:
    return lambda x: x.redistribute(placements=[placement])


@dataclass(frozen=True)
class HeadParallel:
    """Column-wise style for key and value heads: each rank gets those its queries attend to.

    If the degree does not divide the heads, the weight is still sharded and its output gathered.
    """

    n_heads: int

    def __call__(self, module: nn.Module, tp_mesh: DeviceMesh) -> None:
        parallelize_module(module, tp_mesh, ColwiseParallel(use_local_output=False))
        rank, degree = tp_mesh.get_local_rank(), tp_mesh.size()

        def use_local(module: nn.Module, inputs: tuple[Any, ...], output: DTensor) -> torch.Tensor:
            return output.to_local()

        def gather_heads(
            module: nn.Module, inputs: tuple[Any, ...], output: DTensor
        ) -> torch.Tensor:
            # A rank's queries use some of the heads, so gradients are partial sums.
            whole = output.redistribute(placements=[Replicate()])
            heads = whole.to_local(grad_placements=[Partial()]).unflatten(-1, (self.n_heads, -1))
            repeats = math.lcm(self.n_heads, degree) // self.n_heads
            local = heads.repeat_interleave(repeats, dim=-2).chunk(degree, dim=-2)[rank]
            return local.flatten(-2)

        module.register_forward_hook(use_local if self.n_heads % degree == 0 else gather_heads)


@dataclass(frozen=True)
class LocalParameters:
    """Style that shards a module's direct parameters, read by ``to_local_with_partial_grad``."""

    placement: Placement

    def __call__(self, module: nn.Module, tp_mesh: DeviceMesh) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            sharded = distribute_tensor(parameter, tp_mesh, [self.placement], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(sharded))


def fsdp_units(model: Transformer) -> list[list[nn.Module]]:
    """Return one unit per block; last norm and output share one, with the embedding if tied."""
    first: list[nn.Module] = [] if model.tok_embeddings is None else [model.tok_embeddings]
    blocks = [[block] for block in model.layers.values()]
    last: list[nn.Module] = [m for m in (model.norm, model.output) if m is not None]
    if first and last and model.args.tie_embeddings:
        # A parameter belongs to one unit, so modules with a tied weight are gathered together.
        return [*blocks, [*first, *last]]
    return [unit for unit in (first, *blocks, last) if unit]


def blocks(model: Transformer) -> nn.ModuleDict:
    """Return the blocks by layer index."""
    return model.layers


def attentions(model: Transformer) -> list[nn.Module]:
    """Return each layer's attention."""
    return [cast(TransformerBlock, block).attention for block in model.layers.values()]


def split_stage(model: Transformer, layers: range) -> None:
    """Prune ``model`` in place to the pipeline stage of ``layers``.

    The first stage keeps the embedding, the last one norm and output.
    """
    for name in list(model.layers):
        if int(name) not in layers:
            del model.layers[name]
    if layers.start > 0:
        model.tok_embeddings = None
    if layers.stop < model.args.n_layers:
        model.norm = model.output = None


def merge_stages(model: Transformer, stages: list[Transformer]) -> None:
    """Move the modules of ``stages`` into ``model``, under its own FQNs. Mutates both."""
    layers_by_name = {name: block for stage in stages for name, block in stage.layers.items()}
    model.layers = nn.ModuleDict(layers_by_name)
    for stage in stages:
        # Share the buffer, because only ``model`` is materialized.
        stage.rope = model.rope
    embeddings = model.tok_embeddings
    for name in ("tok_embeddings", "norm", "output"):
        found = [child for stage in stages if (child := getattr(stage, name)) is not None]
        setattr(model, name, found[0] if found else None)
    if model.args.tie_embeddings and model.output is not None and model.tok_embeddings is None:
        # The canonical FQN of a tied weight is the embedding's, also on the last stage.
        assert embeddings is not None
        embeddings.weight = model.output.weight
        model.tok_embeddings = embeddings
