"""Where Qwen3-Next may be cut."""

from dataclasses import replace
from typing import cast

import torch.nn as nn

from models.gated_delta_net import GatedDeltaNet
from models.qwen3_moe_sharding import moes
from models.qwen3_next import FLAVORS, GatedAttention, Qwen3Next, Qwen3NextBlock
from models.qwen3_next_hugging_face import HUGGING_FACE
from models.transformer_sharding import transformer_spec


def mixers(model: Qwen3Next) -> list[nn.Module]:
    """What is between positions, layer by layer."""
    return [cast(Qwen3NextBlock, block).attention for block in model.layers.values()]


def attentions(model: Qwen3Next) -> list[nn.Module]:
    return [mixer for mixer in mixers(model) if isinstance(mixer, GatedAttention)]


def delta_nets(model: Qwen3Next) -> list[nn.Module]:
    return [mixer for mixer in mixers(model) if isinstance(mixer, GatedDeltaNet)]


SPEC = replace(
    transformer_spec(FLAVORS, HUGGING_FACE),
    model_cls=Qwen3Next,
    attentions=attentions,
    delta_nets=delta_nets,
    moes=moes,
)
