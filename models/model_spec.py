"""Where a model family says how it is built, cut, trained and converted."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from models.hugging_face import HuggingFace
from models.transformer import TransformerArgs

Style = ParallelStyle | Callable[[nn.Module, DeviceMesh], object]
"""How tensor parallel spreads a module: PyTorch's style, or a function that mutates the module."""


@dataclass(frozen=True)
class ModelSpec:
    """What the rest of the repository needs to know about one model family."""

    model_cls: Callable[[Any], nn.Module]
    flavors: Mapping[str, TransformerArgs]
    """Flavor name to the args of ``model_cls``, as published."""
    tensor_parallel_plan: Callable[[Any], Mapping[str, Style]]
    """Args to {module FQN pattern: parallel style}; covers every parameter."""
    fsdp_units: Callable[[Any], list[list[nn.Module]]]
    """Groups of modules to ``fully_shard``, in forward order; the root is implied."""
    blocks: Callable[[Any], nn.ModuleDict]
    """The repeated blocks, which are recomputed and compiled one by one."""
    attentions: Callable[[Any], list[nn.Module]]
    """Modules whose ``inner(q, k, v, document_ids)`` attends to the whole sequence."""
    delta_nets: Callable[[Any], list[nn.Module]]
    """Modules whose ``inner(qkv, gates, conv, a_log, dt_bias, document_ids)`` needs all of it."""
    moes: Callable[[Any], list[nn.Module]]
    """Mixtures of experts: with ``experts``, ``inner``, ``tally``, ``balance_weight``, and the
    buffers ``bias`` and ``load``."""
    cut_stage: Callable[[Any, range], None]
    """Keep of a model only what the pipeline stage of these layers has."""
    join_stages: Callable[[Any, list[Any]], None]
    """Let a model hold, under its own names, what some of its stages hold."""
    pieces: Mapping[str, bool] = field(default_factory=dict)
    """For blocks that cannot be one graph: the methods they consist of, and whether each can."""
    hugging_face: HuggingFace | None = None
    """Its configs and tensors in Hugging Face's format; None: it has none."""
