"""Interface between a model family and the trainer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from models.hugging_face import HuggingFace
from models.transformer import TransformerArgs

Style = ParallelStyle | Callable[[nn.Module, DeviceMesh], object]
"""A PyTorch parallel style, or a function that shards the module in place."""


@dataclass(frozen=True)
class ModelSpec:
    """A model family: how to build, shard, compile and convert it."""

    model_cls: Callable[[Any], nn.Module]
    flavors: Mapping[str, TransformerArgs]
    """Flavor name to the published args of ``model_cls``."""
    tensor_parallel_plan: Callable[[Any], Mapping[str, Style]]
    """Args to {module FQN pattern: parallel style}; covers every parameter."""
    fsdp_units: Callable[[Any], list[list[nn.Module]]]
    """Groups of modules to ``fully_shard``, in forward order; the root is implied."""
    blocks: Callable[[Any], nn.ModuleDict]
    """Repeated blocks; each is checkpointed and compiled on its own."""
    attentions: Callable[[Any], list[nn.Module]]
    """Attention modules; context parallelism and kernels wrap ``inner(q, k, v, document_ids)``."""
    delta_nets: Callable[[Any], list[nn.Module]]
    """Gated DeltaNets; context parallelism and kernels wrap
    ``inner(qkv, gates, conv, a_log, dt_bias, document_ids)``."""
    moes: Callable[[Any], list[nn.Module]]
    """MoE layers, with ``experts``, ``dispatcher``, ``all_reduce_counts``, ``balance_weight`` and
    the buffers ``bias`` and ``tokens_per_expert``."""
    split_stage: Callable[[Any, range], None]
    """Prune a model in place to one pipeline stage: the given layers, and what is outside of them
    on the first or last stage."""
    merge_stages: Callable[[Any, list[Any]], None]
    """Move the modules of this rank's pipeline stages into one model, under its own FQNs; what they
    lack is deleted from it."""
    compile_regions: Mapping[str, bool] = field(default_factory=dict)
    """Methods of a block with a graph break, by dotted path: each is checkpointed on its own.
    True: compiled as one graph; False: not compiled."""
    hugging_face: HuggingFace | None = None
    """Conversion to Hugging Face's format; None: unsupported."""
