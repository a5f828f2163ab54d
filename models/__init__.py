"""Registry of model families: ``model.name`` and ``model.flavor`` of a config."""

import difflib
import pkgutil
from collections.abc import Mapping
from typing import Any

from models import llama3, qwen3, qwen3_moe_sharding, qwen3_next_sharding
from models.arguments import replace_args
from models.model_spec import ModelSpec
from models.transformer import TransformerArgs

MODEL_SPECS: dict[str, ModelSpec] = {
    "llama3": llama3.SPEC,
    "qwen3": qwen3.SPEC,
    "qwen3_moe": qwen3_moe_sharding.SPEC,
    "qwen3_next": qwen3_next_sharding.SPEC,
}


def find_model(
    name: str, flavor: str, changes: Mapping[str, Any] | None = None
) -> tuple[ModelSpec, TransformerArgs]:
    """Return a family, and the args of one flavor with ``changes``, a config's ``[model.args]``.

    Raises ``ValueError`` that lists known names.
    """
    spec = find_spec(name)
    if flavor not in spec.flavors:
        raise ValueError(_unknown_name(f"model.flavor of {name}", flavor, list(spec.flavors)))
    return spec, replace_args(spec.flavors[flavor], changes or {})


def find_spec(name: str) -> ModelSpec:
    """Return the family ``name``; ``module:attribute`` is imported. Raises ``ValueError``."""
    if ":" in name:
        return _import_spec(name)
    if name not in MODEL_SPECS:
        raise ValueError(_unknown_name("model.name", name, list(MODEL_SPECS)))
    return MODEL_SPECS[name]


def _import_spec(name: str) -> ModelSpec:
    try:
        spec = pkgutil.resolve_name(name)
    except Exception as error:
        text = f"model.name: {name!r} cannot be imported: {type(error).__name__}: {error}"
        raise ValueError(text) from error
    if not isinstance(spec, ModelSpec):
        raise ValueError(f"model.name: {name!r} is not a ModelSpec")
    return spec


def _unknown_name(key: str, value: str, known: list[str]) -> str:
    by_lower = {text.lower(): text for text in known}
    near = difflib.get_close_matches(value.lower(), by_lower, n=1)
    hint = f"; did you mean {by_lower[near[0]]!r}?" if near else ""
    return f"{key}: {value!r} is not one of {', '.join(known)}{hint}"


__all__ = ["MODEL_SPECS", "ModelSpec", "TransformerArgs", "find_model", "find_spec"]
