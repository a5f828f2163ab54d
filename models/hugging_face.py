"""Our models in Hugging Face's format: ``config.json`` and the tensors' names, both ways.

Rotary embeddings turn the halves of a head there too, so no weight is permuted.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NoReturn

import torch

from models.transformer import RopeScaling, TransformerArgs

Convert = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class TensorPair:
    """One of our tensors, and where it is in their files."""

    ours: str
    """FQN."""
    theirs: tuple[str, ...]
    """Its name; if it is stacked, one for each index of dim 0. Empty: not there, as it is zero."""
    is_stacked: bool = False
    to_theirs: Convert | None = None
    to_ours: Convert | None = None
    """The inverse. Both are pure, and take one index of dim 0 if it is stacked. None: unchanged."""
    shares: str | None = None
    """The FQN of ours that this is another name of. Theirs is not written, and may be absent."""


@dataclass(frozen=True)
class HuggingFace:
    """A model family in their format."""

    model_type: str
    config: Callable[[Any], dict[str, Any]]
    """Args to what ``config.json`` says of the model. Raises ``ValueError`` if it cannot say it."""
    args: Callable[[Mapping[str, Any]], TransformerArgs]
    """The inverse. Raises ``ValueError`` that names the key of what is not implemented here."""
    tensors: Callable[[Any], list[TensorPair]]
    """Args to all tensors of the model's state dict."""
    left_out: str = ""
    """Prefix of the names of those tensors of theirs that are no part of the model here."""


@dataclass(frozen=True)
class Table:
    """How a family differs within the dense decoder's shell."""

    model_type: str
    architecture: str
    layer: Mapping[str, str]
    """Modules of a layer that have one weight: our name to theirs."""
    others: Callable[[Any], list[TensorPair]] = lambda args: []
    """Args to the pairs of all other tensors of the layers."""
    args_cls: type[TransformerArgs] = TransformerArgs
    family_args: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the args that are the same in the whole family."""
    numbers: Mapping[str, str] = field(default_factory=dict)
    """Further keys that are numbers, to fields of the args."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Keys that newer versions write, to the older keys that are read and written here."""
    derives_heads: bool = False
    """An absent ``head_dim`` or ``num_key_value_heads`` follows from other keys."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Further keys that must have this value, which is also what an absent one means."""
    required: Mapping[str, Any] = field(default_factory=dict)
    """The same, but an absent one means something else, and is refused."""


NUMBERS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "hidden_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "norm_eps",
}
# All numbers are below this: more is a mistake, and could not be computed with.
MOST = 1 << 40
FIXED = {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0}
# Not written, as most families lack these keys; where present, they must have these values.
FOREIGN = {"mlp_bias": False, "partial_rotary_factor": 1.0, "quantization_config": None}
SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_seq_len",
}
NORMS = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
ATTENTION = {f"attention.w{letter}": f"self_attn.{letter}_proj" for letter in "qkvo"}
QK_NORM = {f"attention.{letter}_norm": f"self_attn.{letter}_norm" for letter in "qk"}
FEED_FORWARD = {
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}


def build_hugging_face(table: Table) -> HuggingFace:
    return HuggingFace(
        model_type=table.model_type,
        config=partial(_config, table),
        args=partial(_args, table),
        tensors=partial(_tensors, table),
    )


def _tensors(table: Table, args: TransformerArgs) -> list[TensorPair]:
    modules = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm"}
    for i in range(args.n_layers):
        modules |= {f"layers.{i}.{o}": f"model.layers.{i}.{t}" for o, t in table.layer.items()}
    pairs = [TensorPair(f"{o}.weight", (f"{t}.weight",)) for o, t in modules.items()]
    shares = "tok_embeddings.weight" if args.tie_embeddings else None
    head = TensorPair("output.weight", ("lm_head.weight",), shares=shares)
    return [*pairs, *table.others(args), head]


def _config(table: Table, args: TransformerArgs) -> dict[str, Any]:
    for name, value in table.family_args.items():
        if getattr(args, name) != value:
            raise ValueError(f"{name}: {getattr(args, name)} is not in {table.architecture}")
    scaling: dict[str, Any] = {}
    if args.rope_scaling is not None:
        scaling = {key: getattr(args.rope_scaling, name) for key, name in SCALING.items()}
        scaling["rope_type"] = "llama3"
    return {
        "architectures": [table.architecture],
        "model_type": table.model_type,
        **{key: getattr(args, name) for key, name in {**NUMBERS, **table.numbers}.items()},
        **FIXED,
        **table.fixed,
        **table.required,
        "tie_word_embeddings": args.tie_embeddings,
        # In both forms, or readers of the older keys alone would silently take defaults.
        "rope_theta": args.rope_theta,
        "rope_scaling": scaling or None,
        "rope_parameters": {"rope_type": "default", "rope_theta": args.rope_theta, **scaling},
    }


def _args(table: Table, config: Mapping[str, Any]) -> TransformerArgs:
    there = {key: value for key, value in config.items() if value is not None}
    for new, key in table.aliases.items():
        if new in there and there.setdefault(key, there[new]) != there[new]:
            _refuse(there, new, f"{key}'s {there[key]}")
    if there.get("model_type") != table.model_type:
        _refuse(there, "model_type", table.model_type)
    expected = {"architectures": [table.architecture], **FIXED, **FOREIGN, **table.fixed}
    for key, value in expected.items():
        if there.get(key, value) != value:
            _refuse(there, key, value)
    for key, value in table.required.items():
        if there.get(key) != value:
            _refuse(there, key, value)
    # Some configs give a window, and turn it off by another key.
    if "sliding_window" in there and there.get("use_sliding_window") is not False:
        _refuse(there, "sliding_window", "none")
    layer_types = there.get("layer_types", [])
    if not isinstance(layer_types, list) or any(t != "full_attention" for t in layer_types):
        _refuse(there, "layer_types", "full_attention")
    is_tied = there.get("tie_word_embeddings", False)
    if not isinstance(is_tied, bool):
        _refuse(there, "tie_word_embeddings", "true or false")
    if table.derives_heads:
        dim, n_heads = (_number(there, key, int) for key in ("hidden_size", "num_attention_heads"))
        there = {"head_dim": dim // n_heads, "num_key_value_heads": n_heads} | there
    kinds = {f.name: f.type for f in fields(table.args_cls)}
    keys = {**NUMBERS, **table.numbers}
    numbers = {name: _number(there, key, kinds[name]) for key, name in keys.items()}
    if numbers["head_dim"] % 2:
        _refuse(there, "head_dim", "an even number")
    if numbers["n_heads"] % numbers["n_kv_heads"]:
        _refuse(there, "num_key_value_heads", "a divisor of num_attention_heads")
    if numbers.get("n_chosen", 0) > numbers.get("n_experts", 0):
        _refuse(there, "num_experts_per_tok", "at most num_experts")
    fixed = {"tie_embeddings": is_tied, **table.family_args}
    return table.args_cls(**numbers, **_rope(there), **fixed)


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The newer ``rope_parameters`` or the two older keys; if both are there, they must agree."""
    rope: dict[str, Any] = {key: config[key] for key in ("rope_theta",) if key in config}
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(key, {}), dict):
            _refuse(config, key, "a table")
        for name, value in config.get(key, {}).items():
            name = "rope_type" if name == "type" else name
            if rope.setdefault(name, value) != value:
                raise ValueError(f"{name}: both {rope[name]!r} and, in {key}, {value!r}")
    if rope.setdefault("rope_type", "default") not in ("default", "llama3"):
        _refuse(rope, "rope_type", "default or llama3")
    known = SCALING if rope["rope_type"] == "llama3" else {}
    for name in rope.keys() - {"rope_type", "rope_theta", *known}:
        _refuse(rope, name, "none")
    scaling = None
    if known:
        kinds = {f.name: f.type for f in fields(RopeScaling)}
        found = {name: _number(rope, key, kinds[name]) for key, name in SCALING.items()}
        scaling = RopeScaling(**found)
    return {"rope_theta": _number(rope, "rope_theta", float), "rope_scaling": scaling}


def _number(config: Mapping[str, Any], key: str, kind: Any) -> Any:
    """The number of that key: above zero, and whole where ``kind`` is int."""
    value = config.get(key)
    is_number = type(value) is int or (kind is float and type(value) is float)
    if not is_number or not 0 < value < MOST:  # type: ignore[operator]
        _refuse(config, key, "a number above zero" if kind is float else "an integer above zero")
    return kind(value)


def _refuse(config: Mapping[str, Any], key: str, want: object) -> NoReturn:
    have = repr(config[key]) if key in config else "absent"
    raise ValueError(f"{key}: {have}; only {want} is implemented here")
