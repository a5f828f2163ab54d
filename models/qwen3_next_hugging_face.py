"""Conversion between Shardloom's and Hugging Face's Qwen3-Next."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from models.hugging_face import NORMS, Table, TensorPair, build_hugging_face, leftover
from models.qwen3_moe import expert_pairs
from models.qwen3_next import Qwen3NextArgs

DELTA_NET = {
    "wqkvz.weight": "in_proj_qkvz.weight",
    "wba.weight": "in_proj_ba.weight",
    "a_log": "A_log",
    "dt_bias": "dt_bias",
    "norm.weight": "norm.weight",
    "wo.weight": "out_proj.weight",
}
ATTENTION = {f"w{letter}.weight": f"{letter}_proj.weight" for letter in "qkvo"}
ATTENTION |= {f"{letter}_norm.weight": f"{letter}_norm.weight" for letter in "qk"}
SHARED = {
    "router": "gate",
    "shared.w1": "shared_expert.gate_proj",
    "shared.w2": "shared_expert.down_proj",
    "shared.w3": "shared_expert.up_proj",
    "shared_gate": "shared_expert_gate",
}


def _pairs(args: Qwen3NextArgs) -> list[TensorPair]:
    pairs = expert_pairs(args)
    for i, kind in enumerate(_layer_types(args)):
        prefix, hf_prefix = f"layers.{i}", f"model.layers.{i}"
        names = {f"feed_forward.{o}.weight": f"mlp.{t}.weight" for o, t in SHARED.items()}
        if kind == "full_attention":
            names |= {f"attention.{o}": f"self_attn.{t}" for o, t in ATTENTION.items()}
        else:
            names |= {f"attention.{o}": f"linear_attn.{t}" for o, t in DELTA_NET.items()}
            pairs.append(_conv_pair(args, f"{prefix}.attention.conv", f"{hf_prefix}.linear_attn"))
        pairs += [TensorPair(f"{prefix}.{o}", (f"{hf_prefix}.{t}",)) for o, t in names.items()]
    return pairs


def _conv_pair(args: Qwen3NextArgs, fqn: str, hf_prefix: str) -> TensorPair:
    """Hugging Face orders q, k and v one after the other; Shardloom groups them by key head."""
    heads, key_size = args.n_key_heads, args.n_key_heads * args.key_dim
    sizes = [key_size, key_size, args.n_value_heads * args.value_dim]

    def from_hf(weight: torch.Tensor) -> torch.Tensor:
        parts = weight.squeeze(1).split(sizes)
        return torch.cat([part.unflatten(0, (heads, -1)) for part in parts], dim=1)

    def to_hf(weight: torch.Tensor) -> torch.Tensor:
        parts = weight.split([size // heads for size in sizes], dim=1)
        return torch.cat([part.flatten(0, 1) for part in parts]).unsqueeze(1)

    return TensorPair(fqn, (f"{hf_prefix}.conv1d.weight",), to_hf=to_hf, from_hf=from_hf)


EVERY = "full_attention_interval"
BASE = build_hugging_face(
    Table(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        layer=NORMS,
        others=_pairs,
        args_cls=Qwen3NextArgs,
        numbers={
            "num_experts": "n_experts",
            "num_experts_per_tok": "top_k",
            "moe_intermediate_size": "hidden_dim",
            "shared_expert_intermediate_size": "shared_hidden_dim",
            "linear_num_key_heads": "n_key_heads",
            "linear_num_value_heads": "n_value_heads",
            "linear_key_head_dim": "key_dim",
            "linear_value_head_dim": "value_dim",
            "linear_conv_kernel_dim": "conv_size",
            # ``_config`` and ``_args`` convert these two to and from other keys.
            "rotary_dim": "rotary_dim",
            "full_attention_interval": "attention_every",
        },
        defaults={
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "max_position_embeddings": 32768,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "partial_rotary_factor": 0.25,
        },
        fixed={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    )
)


def _config(args: Qwen3NextArgs) -> dict[str, Any]:
    config = BASE.config(args)
    fraction = config.pop("rotary_dim") / args.head_dim
    if int(args.head_dim * fraction) < args.rotary_dim:
        # transformers rounds down.
        fraction = math.nextafter(fraction, 1.0)
    rope = config["rope_parameters"] | {"partial_rotary_factor": fraction}
    layer_types = _layer_types(args)
    return config | {
        "partial_rotary_factor": fraction, "rope_parameters": rope, "layer_types": layer_types
    }  # fmt: skip


def _defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    every = {} if {"full_attention_interval", "layer_types"} & config.keys() else {EVERY: 4}
    return BASE.defaults(config) | every


def _args(config: Mapping[str, Any]) -> Qwen3NextArgs:
    given = _defaults(config) | dict(config)
    rope = given.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_parameters: {rope!r} (supported: a table)")
    rope = given["rope_parameters"] = dict(rope)
    older, fraction = (table.pop("partial_rotary_factor", None) for table in (given, rope))
    fraction = older if fraction is None else fraction
    if older not in (None, fraction):
        text = f"{older!r} conflicts with rope_parameters: {fraction!r}"
        raise ValueError(f"partial_rotary_factor: {text}")
    if not isinstance(fraction, int | float) or not 0.0 < fraction <= 1.0:
        raise ValueError(f"partial_rotary_factor: {fraction!r} (supported: above 0, up to 1)")
    # ``BASE.args`` rejects a head_dim that is no number.
    head_dim = given["head_dim"]
    given["rotary_dim"] = int(head_dim * fraction) if isinstance(head_dim, int) else None
    given.setdefault(EVERY, 4)
    layer_types = given.pop("layer_types", None)
    args = BASE.args(given)
    assert isinstance(args, Qwen3NextArgs)
    if not isinstance(layer_types, list | None):
        raise ValueError(f"layer_types: {layer_types!r} (supported: a list)")
    if layer_types is not None and layer_types != _layer_types(args):
        if EVERY in config:
            raise ValueError(f"layer_types: conflicts with {EVERY}: {config[EVERY]!r}")
        every = layer_types.index("full_attention") + 1 if "full_attention" in layer_types else 0
        args = replace(args, attention_every=every or args.n_layers + 1)
        if layer_types != _layer_types(args):
            raise ValueError("layer_types: unsupported, attention must be in every n-th layer")
    return args


def _layer_types(args: Qwen3NextArgs) -> list[str]:
    kinds = {True: "full_attention", False: "linear_attention"}
    return [kinds[args.has_attention(i)] for i in range(args.n_layers)]


def _skipped_kind(name: str, ndim: int) -> str:
    # Multi-token prediction of published folders, which transformers skips too.
    return "mtp.*" if name.startswith("mtp.") else leftover(name, ndim)


HUGGING_FACE = replace(
    BASE, config=_config, args=_args, defaults=_defaults, skipped_kind=_skipped_kind
)
