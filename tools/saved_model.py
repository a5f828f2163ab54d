"""Which checkpoint a tool's argument means, and which model and tokenizer belong to it."""

import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from checkpoint.manifest import NAME
from checkpoint.storage import Entry
from checkpoint.store import problems_of, published
from config.changes import changed_arguments
from data.tokenizer import Tokenizer, load_tokenizer
from models import ModelSpec, TransformerArgs, find_spec


def saved_model(
    checkpoint: Path, manifest: Mapping[str, Any]
) -> tuple[str, ModelSpec, TransformerArgs]:
    """The family's name, the family, and the sizes; raise ``ValueError`` if none is known here."""
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


def saved_tokenizer(
    checkpoint: Path, manifest: Mapping[str, Any], name: str | None
) -> tuple[str, Tokenizer] | None:
    """A tokenizer's name, and the tokenizer: ``name`` or, without one, the checkpoint's; None if
    neither names one. Raise ``ValueError`` if it is another than the model's, or unreadable."""
    named_by, hint = "argument --tokenizer", ""
    if not name:
        named_by, hint = f"{checkpoint}: data.tokenizer", "; --tokenizer says where it is now"
    name = name or manifest["config"].get("data", {}).get("tokenizer")
    if name is None:
        return None
    try:
        tokenizer = load_tokenizer(name)
    except ValueError as error:
        raise ValueError(f"{named_by}{str(error).removeprefix('data.tokenizer')}{hint}") from None
    fingerprint = manifest.get("fingerprints", {}).get("tokenizer", tokenizer.fingerprint)
    if tokenizer.fingerprint != fingerprint:
        text = f"{name} is not the tokenizer that the model was trained with"
        raise ValueError(f"{named_by}: {text}; --tokenizer names another")
    return name, tokenizer


def check_shapes(
    checkpoint: Path, have: Mapping[str, Entry], want: Mapping[str, torch.Size]
) -> None:
    """Raise ``ValueError`` that names a weight whose shapes differ, or that one side lacks."""
    shapes = {fqn: entry.shape for fqn, entry in have.items()}
    for fqn in sorted(shapes.keys() | want.keys()):
        wanted = list(want[fqn]) if fqn in want else "absent"
        if (found := shapes.get(fqn, "absent")) != wanted:
            text = f"its {fqn} is {found}, not {wanted}"
            raise ValueError(f"{checkpoint} is of another model: {text}")


def _build(kind: Any, saved: Mapping[str, Any]) -> Any:
    """The dataclass ``kind`` from its dict, ``saved``; its fields may be dataclasses or None."""
    values = {f.name: saved[f.name] for f in fields(kind) if f.name in saved}
    for f in fields(kind):
        nested = [option for option in (f.type, *get_args(f.type)) if is_dataclass(option)]
        if nested and isinstance(values.get(f.name), dict):
            values[f.name] = _build(nested[0], values[f.name])
    return kind(**values)


def find_checkpoint(path: Path) -> Path:
    """The folder of a checkpoint that verifies: ``path`` or, if that is a run's, its newest."""
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder")
    checkpoints = [path] if (path / NAME).exists() else published(path / "checkpoints")
    if not checkpoints:
        raise ValueError(f"{path}: no checkpoint ({NAME}), and no run that has some (checkpoints/)")
    problems: list[str] = []
    for folder in checkpoints:
        found = problems_of(folder)
        if not found:
            print(
                "".join(f"passed over: {problem}\n" for problem in problems),
                end="",
                file=sys.stderr,
            )
            return folder
        problems += found
    raise ValueError(f"{path}: nothing that verifies: {'; '.join(problems)}")
