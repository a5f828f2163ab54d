"""Where the dense decoder may be cut. Facts about its FQNs; no mesh and no calls."""

import torch.nn as nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from models.transformer import Transformer, TransformerArgs


def tensor_parallel_plan(args: TransformerArgs) -> dict[str, ParallelStyle]:
    """Tensor parallel inside attention and feed-forward, sequence parallel between them.

    Megatron-LM's scheme (arXiv 2205.05198), in PyTorch's ``ParallelStyle`` by FQN pattern.
    Complete: every parameter of the model is under some entry.
    """
    plan: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.attention": PrepareModuleInput(
            # x is gathered along the sequence; rope and document_ids are whole on every rank.
            input_layouts=(Shard(1), None, None),
            desired_input_layouts=(Replicate(), None, None),
        ),
        "layers.*.attention.w[qkv]": ColwiseParallel(),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.ffn_norm": SequenceParallel(),
        "layers.*.feed_forward": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
        "layers.*.feed_forward.w[13]": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    if args.qk_norm:
        # Sharded over heads, dim 2 of (b, s, h, k), so that their gradients are summed.
        head_norm = SequenceParallel(sequence_dim=2, use_local_output=True)
        plan["layers.*.attention.[qk]_norm"] = head_norm
    return plan


def fsdp_units(model: Transformer) -> list[list[nn.Module]]:
    """One unit per block; the last norm and the output share one, with the embedding if tied."""
    blocks = [[block] for block in model.layers.values()]
    if model.args.tie_embeddings:
        # One parameter belongs to one unit: what shares it must be gathered together.
        return [*blocks, [model.tok_embeddings, model.norm, model.output]]
    return [[model.tok_embeddings], *blocks, [model.norm, model.output]]


def blocks(model: Transformer) -> nn.ModuleDict:
    return model.layers
