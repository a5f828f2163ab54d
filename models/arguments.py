"""Check a model's arguments, and replace some of them as ``[model.args]`` of a config asks."""

import difflib
import json
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from models.transformer import RopeScaling, TransformerArgs

# Arguments that other keys set.
SET_BY = {
    "vocab_size": "model.vocab_size",
    "max_seq_len": "training.seq_len",
    "balance_weight": "experts.balance_loss",
}
# The first must be a multiple of the second.
MULTIPLES = (("n_heads", "n_kv_heads"), ("n_value_heads", "n_key_heads"))
POSITIVE = ("rope_theta", "norm_eps")
# Rotary embeddings rotate pairs of these dims.
EVEN = ("head_dim", "rotary_dim")
# The first must not exceed the second.
BOUNDS = (("top_k", "n_experts"), ("rotary_dim", "head_dim"))


def replace_args(args: TransformerArgs, changes: Mapping[str, Any]) -> TransformerArgs:
    """Return ``args`` with ``changes``, a table of a config. Raises ``ValueError`` by key."""
    known = {field.name: field for field in fields(args) if field.name not in SET_BY}
    values: dict[str, Any] = {}
    for name, value in changes.items():
        key = f"model.args.{name}"
        if name in SET_BY:
            raise ValueError(f"{key}: set {SET_BY[name]} instead")
        if name in args.WITHOUT_EFFECT:
            raise ValueError(f"{key}: has no effect: {args.WITHOUT_EFFECT[name]}")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise ValueError(f"{key}: unknown argument; {hint}")
        if name == "rope_scaling":
            values[name] = _rope_scaling(args.rope_scaling, value)
        else:
            default = getattr(args, name)
            if default is None:
                default = _example(get_type_hints(type(args))[name], value)
            values[name] = _value(key, default, value)
    changed = replace(args, **values)
    problem = find_problem(changed)
    if problem:
        raise ValueError(f"model.args: {problem}")
    return changed


def find_problem(args: TransformerArgs, keys: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return why no model has these arguments, "" if they are possible.

    ``keys``: other names of arguments, for the text.
    """
    given, sizes = vars(args), names_of_families(type(args))
    shown = {name: f"{keys.get(name, name)} = {value!r}" for name, value in given.items()}
    for name, value in given.items():
        is_size = name in sizes and isinstance(value, int) and not isinstance(value, bool)
        if (is_size and value < 1) or (name in POSITIVE and not 0 < value < 1e30):
            return f"{shown[name]} must be positive"
        try:
            json.dumps(value, default=asdict)
        except (TypeError, ValueError):
            return f"{shown[name]} is of a type that checkpoints, which are JSON, cannot save"
    for name in EVEN:
        if given.get(name, 0) % 2:
            return f"{shown[name]} must be even"
    for name, divisor in MULTIPLES:
        if name in given and given[name] % given[divisor]:
            return f"{shown[name]} must be a multiple of {shown[divisor]}"
    for name, bound in BOUNDS:
        if name in given and given[name] > given[bound]:
            return f"{shown[name]} must not exceed {shown[bound]}"
    scaling = args.rope_scaling
    if scaling is not None and scaling.low_freq_factor > scaling.high_freq_factor:
        return f"{shown['rope_scaling']}: low_freq_factor must not exceed high_freq_factor"
    return ""


def names_of_families(kind: type) -> set[str]:
    """Return names of the arguments of Shardloom's families, without those of a user's subclass."""
    classes = [c for c in kind.__mro__ if c.__module__.startswith(f"{__package__}.")]
    return {field.name for c in classes if is_dataclass(c) for field in fields(c)}


def _value(key: str, default: Any, value: Any) -> Any:
    kind = type(default)
    if kind is tuple and type(value) is list:
        is_alike = len({type(entry) for entry in default}) == 1
        return tuple(_value(key, default[0], each) if is_alike else each for each in value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        names = {int: "an integer", float: "a number", bool: "true or false", tuple: "an array"}
        raise ValueError(f"{key}: must be {names.get(kind, kind.__name__)}, got {value!r}")
    return value


def _example(hint: Any, value: Any) -> Any:
    """Return a value of the type ``hint``; of a union, of the member that ``value`` is of, if any.

    ``value`` itself if the type is not one that TOML has.
    """
    if get_origin(hint) in (Union, UnionType):
        examples = [_example(each, value) for each in get_args(hint) if each is not NoneType]
        alike = [each for each in examples if type(each) is type(value)]
        return (alike or examples)[0]
    if get_origin(hint) is tuple:
        return tuple(_example(each, None) for each in get_args(hint) if each is not Ellipsis)
    return hint() if hint in (bool, int, float, str, tuple) else value


def _rope_scaling(default: RopeScaling | None, value: Any) -> RopeScaling | None:
    """Scaling with the entries of a table replaced; an empty table turns it off."""
    key = "model.args.rope_scaling"
    if not isinstance(value, dict):
        raise ValueError(f"{key}: must be a table, got {value!r}")
    if not value:
        return None
    known = {field.name: field.default for field in fields(RopeScaling)}
    for name, entry in value.items():
        if name not in known:
            raise ValueError(f"{key}.{name}: unknown argument; known: {', '.join(known)}")
        _value(f"{key}.{name}", 1 if name == "original_max_seq_len" else 1.0, entry)
        if entry <= 0:
            raise ValueError(f"{key}.{name}: must be positive, got {entry!r}")
    if default is None and "factor" not in value:
        raise ValueError(f"{key}.factor: must be set")
    return RopeScaling(**value) if default is None else replace(default, **value)
