"""Conversion between Shardloom and Hugging Face: ``config.json`` and tensor names, both ways.

Both rotate the halves of a head (not interleaved pairs), so no weight is permuted.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from types import NoneType
from typing import Any, NoReturn, get_args, get_type_hints

import torch

from models.arguments import find_problem
from models.transformer import RopeScaling, TransformerArgs

Convert = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class TensorPair:
    """A Shardloom tensor and its Hugging Face tensors."""

    fqn: str
    """Shardloom FQN."""
    hf_names: tuple[str, ...]
    """Hugging Face names; one per index of dim 0 if stacked. Empty: absent there, must be zero."""
    is_stacked: bool = False
    to_hf: Convert | None = None
    from_hf: Convert | None = None
    """Inverse of ``to_hf``. Both are pure and take one index of dim 0 if stacked."""
    tied_to: str | None = None
    """FQN of the tensor this one is tied to. Not written on export; optional on import."""


# Buffers that older versions of transformers saved, and follow from config.json: names and ndim.
# It skips them too. A tensor of such a name and another ndim may be a parameter.
LEFTOVERS = {
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(original_)?inv_freq": (1,),
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(cos|sin)_cached": (2, 4),
    # Causal masks and the value of masked scores.
    r"model\.layers\.\d+\.(self_)?attn\.bias": (4,),
    r"model\.layers\.\d+\.(self_)?attn\.masked_bias": (0,),
}


def leftover(name: str, ndim: int) -> str:
    """Kind of a Hugging Face tensor that holds no weights of any family; "" for any other."""
    matches = (re.fullmatch(pattern, name) and ndim in dims for pattern, dims in LEFTOVERS.items())
    return ".".join(["*", *name.split(".")[-2:]]) if any(matches) else ""


@dataclass(frozen=True)
class HuggingFace:
    """Conversion of a model family."""

    model_type: str
    config: Callable[[Any], dict[str, Any]]
    """Convert args to ``config.json``. Raises ``ValueError`` for args it cannot express."""
    args: Callable[[Mapping[str, Any]], TransformerArgs]
    """Inverse of ``config``. Raises ``ValueError`` that names an unsupported key."""
    tensors: Callable[[Any], list[TensorPair]]
    """Args to the pairs of all tensors of the state dict."""
    defaults: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}
    """Keys that a ``config.json`` lacks, with the values that transformers and ``args`` take."""
    skipped_kind: Callable[[str, int], str] = leftover
    """Name and ndim of a Hugging Face tensor to its kind if the Shardloom model needs none of it,
    else ""."""


@dataclass(frozen=True)
class Table:
    """Parts of the conversion that differ between families of ``Transformer``."""

    model_type: str
    architecture: str
    layer: Mapping[str, str]
    """Modules of a layer with one ``weight``: Shardloom name to Hugging Face name."""
    others: Callable[[Any], list[TensorPair]] = lambda args: []
    """Args to the pairs of all other tensors: biases, those outside of the layers, and those that
    need a function."""
    args_cls: type[TransformerArgs] = TransformerArgs
    family_args: Mapping[str, Any] = field(default_factory=dict)
    """Args with the same value in the whole family."""
    numbers: Mapping[str, str] = field(default_factory=dict)
    """Numeric config keys besides ``NUMBERS``, to args of ``args_cls``: int, float, or one of them
    or None, which is an absent key."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Keys that newer transformers versions write, to the older keys that are used here."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of transformers besides ``DEFAULTS``. Without one, ``head_dim`` and
    ``num_key_value_heads`` follow from ``hidden_size`` and ``num_attention_heads``."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Keys that must have this value, which is also their default."""
    required: Mapping[str, Any] = field(default_factory=dict)
    """Keys that must be present with this value, because their default is another."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for an arg that ``args_cls`` lacks, or that is no number."""
        known = {each.name for each in fields(self.args_cls)}
        hints = get_type_hints(self.args_cls)
        for key, name in self.numbers.items():
            text = f"the table of {self.architecture}: numbers has {key!r}: {name!r}"
            if name not in known:
                raise ValueError(f"{text}, but args_cls {self.args_cls.__name__} no {name!r}")
            if not _kinds(hints[name]) <= {int, float, NoneType}:
                raise ValueError(f"{text}, but that is {hints[name]}: supported: int, float")


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
DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False}
# Larger numbers are mistakes and would overflow.
MAX_NUMBER = 1 << 40
FIXED = {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0}
# Not written, because most families lack these keys.
FIXED_IF_PRESENT = {"mlp_bias": False, "partial_rotary_factor": 1.0, "quantization_config": None}
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
    """Build a family's conversion from its table."""
    return HuggingFace(
        model_type=table.model_type,
        config=partial(_config, table),
        args=partial(_args, table),
        defaults=partial(_defaults, table),
        tensors=partial(_tensors, table),
    )


def _tensors(table: Table, args: TransformerArgs) -> list[TensorPair]:
    modules = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm"}
    for i in range(args.n_layers):
        modules |= {f"layers.{i}.{o}": f"model.layers.{i}.{t}" for o, t in table.layer.items()}
    pairs = [TensorPair(f"{o}.weight", (f"{t}.weight",)) for o, t in modules.items()]
    tied_to = "tok_embeddings.weight" if args.tie_embeddings else None
    head = TensorPair("output.weight", ("lm_head.weight",), tied_to=tied_to)
    return [*pairs, *table.others(args), head]


def _config(table: Table, args: TransformerArgs) -> dict[str, Any]:
    for name, value in table.family_args.items():
        if getattr(args, name) != value:
            raise ValueError(
                f"{name}: {getattr(args, name)} is not supported by {table.architecture}"
            )
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
        # In both forms, because readers of only the older keys would silently use defaults.
        "rope_theta": args.rope_theta,
        "rope_scaling": scaling or None,
        "rope_parameters": {"rope_type": "default", "rope_theta": args.rope_theta, **scaling},
    }


def _args(table: Table, config: Mapping[str, Any]) -> TransformerArgs:
    given = {key: value for key, value in config.items() if value is not None}
    for new, key in table.aliases.items():
        if new in given and given.setdefault(key, given[new]) != given[new]:
            _reject(given, new, f"{key} = {given[key]}")
    if given.get("model_type") != table.model_type:
        _reject(given, "model_type", table.model_type)
    names = given.get("architectures", [table.architecture])
    # The first folders spell it LLaMAForCausalLM.
    if not isinstance(names, list) or [str(n).lower() for n in names] != [
        table.architecture.lower()
    ]:
        _reject(given, "architectures", [table.architecture])
    expected = {**FIXED, **FIXED_IF_PRESENT, **table.fixed}
    for key, value in expected.items():
        if given.get(key, value) != value:
            _reject(given, key, value)
    for key, value in table.required.items():
        if given.get(key) != value:
            _reject(given, key, value)
    # Some configs set a window and disable it by another key.
    has_window = "sliding_window" in given and "sliding_window" not in table.numbers
    if has_window and given.get("use_sliding_window") is not False:
        _reject(given, "sliding_window", "none")
    layer_types = given.get("layer_types", [])
    if not isinstance(layer_types, list) or any(t != "full_attention" for t in layer_types):
        _reject(given, "layer_types", "full_attention")
    is_tied = given.get("tie_word_embeddings", False)
    if not isinstance(is_tied, bool):
        _reject(given, "tie_word_embeddings", "true or false")
    given = _defaults(table, config) | given
    kinds = get_type_hints(table.args_cls)
    keys = {**NUMBERS, **table.numbers}
    numbers = {name: _number(given, key, kinds[name]) for key, name in keys.items()}
    fixed = {"tie_embeddings": is_tied, **table.family_args}
    args = table.args_cls(**numbers, **_rope(given), **fixed)
    if problem := find_problem(args, {name: key for key, name in keys.items()}):
        raise ValueError(problem)
    return args


def _defaults(table: Table, config: Mapping[str, Any]) -> dict[str, Any]:
    present = set(config) | {key for new, key in table.aliases.items() if new in config}
    for key in ("rope_scaling", "rope_parameters"):
        present |= set(config[key]) if isinstance(config.get(key), dict) else set()
    defaults = {**DEFAULTS, **table.defaults}
    absent = {key: value for key, value in defaults.items() if key not in present}
    dim, n_heads = ({**absent, **config}.get(k) for k in ("hidden_size", "num_attention_heads"))
    if type(dim) is int and type(n_heads) is int and n_heads > 0:
        derived = {"num_key_value_heads": n_heads, "head_dim": dim // n_heads}
        # null means the same as an absent key here, and only here.
        keys = [key for key in derived if key not in defaults and config.get(key) is None]
        absent |= {key: derived[key] for key in keys}
    return absent


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the newer ``rope_parameters`` or the two older keys, which must agree if both exist."""
    rope: dict[str, Any] = {key: config[key] for key in ("rope_theta",) if key in config}
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(key, {}), dict):
            _reject(config, key, "a table")
        for name, value in config.get(key, {}).items():
            name = "rope_type" if name == "type" else name
            if rope.setdefault(name, value) != value:
                raise ValueError(f"{name}: {rope[name]!r} conflicts with {key}: {value!r}")
    if rope.setdefault("rope_type", "default") not in ("default", "llama3"):
        _reject(rope, "rope_type", "default or llama3")
    known = SCALING if rope["rope_type"] == "llama3" else {}
    for name in rope.keys() - {"rope_type", "rope_theta", *known}:
        _reject(rope, name, "none")
    scaling = None
    if known:
        kinds = {f.name: f.type for f in fields(RopeScaling)}
        found = {name: _number(rope, key, kinds[name]) for key, name in SCALING.items()}
        scaling = RopeScaling(**found)
    return {"rope_theta": _number(rope, "rope_theta", float), "rope_scaling": scaling}


def _number(config: Mapping[str, Any], key: str, hint: Any) -> Any:
    """Return the positive number at ``key``; raise ``ValueError`` if it is not as the type hint."""
    value, kinds = config.get(key), _kinds(hint)
    if key not in config and NoneType in kinds:
        return None
    kind = float if float in kinds else int
    is_number = type(value) is int or (kind is float and type(value) is float)
    if not is_number or not 0 < value < MAX_NUMBER:  # type: ignore[operator]
        _reject(config, key, "a number above zero" if kind is float else "an integer above zero")
    return kind(value)  # type: ignore[arg-type]


def _kinds(hint: Any) -> set[Any]:
    """Types of a hint: of ``int | None`` both."""
    return set(get_args(hint)) or {hint}


def _reject(config: Mapping[str, Any], key: str, want: object) -> NoReturn:
    have = repr(config[key]) if key in config else "absent"
    raise ValueError(f"{key}: {have} (supported: {want})")
