"""Registry of model families: ``model.name`` and ``model.flavor`` of a config."""

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models import llama3, qwen3, qwen3_moe_sharding, qwen3_next_sharding
from models.arguments import replace_args
from models.model_spec import ModelSpec
from models.transformer import TransformerArgs
from runtime.outside import import_attribute
from runtime.printable import reason_of

MAX_CONFIG_BYTES = 1 << 20

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

    ``flavor`` may be a Hugging Face ``config.json`` or its folder. Raises ``ValueError`` that lists
    known names.
    """
    spec = find_spec(name)
    if flavor in spec.flavors:
        args = spec.flavors[flavor]
    elif flavor.endswith(".json") or os.path.isdir(flavor):
        args = _read_args(spec, Path(flavor))
    else:
        text = _unknown_name(f"model.flavor of {name}", flavor, list(spec.flavors))
        raise ValueError(text + (f"; did you mean hf:{flavor}?" if flavor.count("/") == 1 else ""))
    return spec, replace_args(args, changes or {})


def find_spec(name: str) -> ModelSpec:
    """Return the family ``name``; ``module:attribute`` is imported. Raises ``ValueError``."""
    if ":" in name:
        return _import_spec(name)
    if name not in MODEL_SPECS:
        raise ValueError(_unknown_name("model.name", name, list(MODEL_SPECS)))
    return MODEL_SPECS[name]


def find_family(config: Mapping[str, Any]) -> str:
    """Return the family of a Hugging Face ``config.json``. Raises ``ValueError`` for others."""
    model_type = config.get("model_type")
    families = {s.hugging_face.model_type: n for n, s in MODEL_SPECS.items() if s.hugging_face}
    if not isinstance(model_type, str) or model_type not in families:
        raise ValueError(f"model_type: {model_type!r} is not one of {', '.join(families)}")
    return families[model_type]


def _read_args(spec: ModelSpec, path: Path) -> TransformerArgs:
    """Read the args of a Hugging Face ``config.json``, or of the one in the folder ``path``."""
    if path.is_dir():
        path /= "config.json"
    try:
        if spec.hugging_face is None:
            raise ValueError("the family has no Hugging Face format")
        if path.exists() and not path.is_file():
            raise ValueError("not a regular file")
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ValueError(f"larger than {MAX_CONFIG_BYTES:,} bytes")
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("not a JSON object")
        return spec.hugging_face.args(config)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"model.flavor: {path}: {reason_of(error)}") from None


def _import_spec(name: str) -> ModelSpec:
    spec = import_attribute("model.name", name)
    if not isinstance(spec, ModelSpec):
        raise ValueError(f"model.name: {name!r} is not a ModelSpec")
    return spec


def _unknown_name(key: str, value: str, known: list[str]) -> str:
    by_lower = {text.lower(): text for text in known}
    near = difflib.get_close_matches(value.lower(), by_lower, n=1)
    hint = f"; did you mean {by_lower[near[0]]!r}?" if near else ""
    return f"{key}: {value!r} is not one of {', '.join(known)}{hint}"


__all__ = ["MODEL_SPECS", "ModelSpec", "TransformerArgs", "find_family", "find_model", "find_spec"]
