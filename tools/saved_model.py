"""Which model a checkpoint is of."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args

from checkpoint.manifest import NAME
from config.changes import changed_arguments
from models import ModelSpec, TransformerArgs, find_spec


def saved_model(
    checkpoint: Path, manifest: Mapping[str, Any]
) -> tuple[str, ModelSpec, TransformerArgs]:
    """The family's name, the family, and the sizes; raise ``ValueError`` if none known here."""
    try:
        name, saved = manifest["config"]["model"]["name"], manifest["model_args"]
        if not isinstance(name, str):
            raise TypeError
        spec = find_spec(name)
        args = _build(type(next(iter(spec.flavors.values()))), saved)
    except (KeyError, TypeError):
        raise ValueError(f"{checkpoint}: its {NAME} does not say of which model it is") from None
    except ValueError as error:
        raise ValueError(f"{checkpoint}: {error}") from None
    if changed := changed_arguments(saved, args):
        raise ValueError(f"{checkpoint}: {name} is another model now: {'; '.join(changed)}")
    return name, spec, args


def _build(kind: Any, saved: Mapping[str, Any]) -> Any:
    """The dataclass of which ``saved`` is the dict; fields of it may be dataclasses or None."""
    values = {f.name: saved[f.name] for f in fields(kind) if f.name in saved}
    for f in fields(kind):
        nested = [option for option in (f.type, *get_args(f.type)) if is_dataclass(option)]
        if nested and isinstance(values.get(f.name), dict):
            values[f.name] = _build(nested[0], values[f.name])
    return kind(**values)
