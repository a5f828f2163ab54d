"""Resolve a tool's argument to a checkpoint, and a checkpoint to its model and tokenizer."""

import math
import reprlib
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from itertools import product
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import torch

from checkpoint.checkpoint_dir import verify_checkpoint
from checkpoint.hugging_face import is_hugging_face
from checkpoint.manifest import MANIFEST_FILE, sizes_of
from checkpoint.tensor_files import DTYPES
from checkpoint.tensor_index import TensorRecord, read_index
from config.hub_names import is_hub_name
from config.resume_compat import changed_arguments
from data.markers import FORMER_BOS_NAMES, FORMER_EOS_NAMES
from data.tokenizer import Tokenizer, load_tokenizer
from models import ModelSpec, TransformerArgs, find_spec
from models.arguments import names_of_families
from models.hugging_face import MAX_NUMBER
from models.meta import build_on_meta
from runtime.commands import command_text
from runtime.log import say
from runtime.run_folder import list_checkpoints

# Prefix of weights in a checkpoint, which also has the optimizer's state.
PREFIX = "model."
# Types of JSON values for a field of each type.
NUMBERS: dict[Any, set[type]] = {int: {int}, float: {int, float}, bool: {bool}}
# Memory that a model may need besides its weights, such as the table of rotary angles: as much as
# the weights, and this much.
EXTRA_BYTES = 256 << 20


@dataclass(frozen=True)
class SavedModel:
    """Model of a checkpoint. Its args fit the checkpoint's tensors, so it may be built."""

    name: str
    spec: ModelSpec
    args: TransformerArgs
    index: dict[str, TensorRecord]
    """All tensors of the checkpoint."""

    @property
    def weights(self) -> dict[str, TensorRecord]:
        """The model's tensors by their FQN in the model."""
        return {
            fqn.removeprefix(PREFIX): record
            for fqn, record in self.index.items()
            if fqn.startswith(PREFIX)
        }


def saved_model(checkpoint: Path, manifest: Mapping[str, Any], given: str | None) -> SavedModel:
    """Return the model of a verified checkpoint. Allocates nothing.

    ``given``: the caller's argument --model. A model outside of Shardloom, ``module:attribute``, is
    imported only if the caller names it, because an import runs code. Raises ``ValueError`` if the
    model is unknown, has other arguments in this version, or does not fit the checkpoint's tensors.
    """
    try:
        name, saved = manifest["config"]["model"]["name"], manifest["model_args"]
        if not isinstance(name, str):
            raise TypeError
        _check_given(name, given)
        spec = find_spec(name)
        args = _build(type(next(iter(spec.flavors.values()))), saved)
    except (KeyError, TypeError):
        raise ValueError(
            f"{checkpoint}: {MANIFEST_FILE} has no valid model.name and model_args"
        ) from None
    except ValueError as error:
        raise ValueError(f"{checkpoint}: {error}") from None
    if changed := changed_arguments(saved, args):
        raise ValueError(
            f"{checkpoint}: {name} has changed since it was saved: {'; '.join(changed)}"
        )
    model = SavedModel(name, spec, args, read_index(checkpoint, sizes_of(manifest)))
    _check_fit(checkpoint, model)
    return model


def _check_fit(checkpoint: Path, model: SavedModel) -> None:
    """Raise ``ValueError`` unless the model's args fit the checkpoint's tensors."""
    weights = model.weights
    # Before the model is built, because the time for that grows with its layers.
    if model.args.n_layers > len(weights):
        text = f"{len(weights)} tensors for model_args.n_layers = {model.args.n_layers}"
        raise ValueError(f"{checkpoint} does not match the model: {text}")
    try:
        shapes, extra = shapes_of(model.spec, model.args)
    except ValueError as error:
        raise ValueError(f"{checkpoint}: {error}") from None
    check_shapes(checkpoint, weights, shapes)
    n_bytes = sum(math.prod(r.shape) * DTYPES[r.dtype].itemsize for r in weights.values())
    if extra > n_bytes + EXTRA_BYTES:
        text = f"{extra:,} bytes besides its weights of {n_bytes:,}"
        sequence = f"model_args.max_seq_len = {model.args.max_seq_len}"
        raise ValueError(f"{checkpoint}: the model needs {text}; {sequence}")


def shapes_of(spec: ModelSpec, args: TransformerArgs) -> tuple[dict[str, torch.Size], int]:
    """Shapes of the model's state dict, and bytes of its other buffers. Allocates nothing.

    Raises ``ValueError`` for sizes that cannot be built.
    """
    try:
        model = build_on_meta(spec, args, torch.float32)
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{args}: {error}") from None
    shapes = {fqn: tensor.shape for fqn, tensor in model.state_dict().items()}
    return shapes, sum(b.nbytes for fqn, b in model.named_buffers() if fqn not in shapes)


def _check_given(name: str, given: str | None) -> None:
    """Raise ``ValueError`` if ``name``, a checkpoint's model, needs --model or contradicts it."""
    if given == name or (given is None and ":" not in name):
        return
    text = f"model.name is {name!r}"
    if given is not None:
        raise ValueError(f"{text}, not {given!r} of argument --model")
    raise ValueError(f"{text}, whose import runs code: if you trust it, set --model {name}")


def saved_tokenizer(
    checkpoint: Path, manifest: Mapping[str, Any], name: str | None
) -> tuple[str, Tokenizer] | None:
    """Name and tokenizer: ``name`` or, by default, the checkpoint's; None if neither names one.

    Raises ``ValueError`` if it is unreadable, or not the one that the model was trained with.
    """
    named_by, hint = "argument --tokenizer", ""
    if not name:
        named_by, hint = f"{checkpoint}: data.tokenizer", "; set --tokenizer if it has moved"
    keys = manifest["config"].get("data", {})
    name = name or keys.get("tokenizer")
    if name is None:
        return None
    try:
        tokenizer = load_tokenizer(name, bos=keys.get("bos"), eos=keys.get("eos"))
    except ValueError as error:
        text = str(error).removeprefix("data.tokenizer: ")
        raise ValueError(f"{named_by}: {text}{hint}") from None
    fingerprint = manifest.get("fingerprints", {}).get("tokenizer", tokenizer.fingerprint)
    if tokenizer.fingerprint != fingerprint and "bos" not in keys:
        tokenizer = _with_former_markers(name, fingerprint) or tokenizer
    if tokenizer.fingerprint != fingerprint:
        text = f"{name} is not the tokenizer that the model was trained with"
        raise ValueError(f"{named_by}: {text}; set another --tokenizer")
    return name, tokenizer


def _with_former_markers(name: str, fingerprint: str) -> Tokenizer | None:
    """Load the tokenizer with the bos and eos of a checkpoint from before they were keys."""
    for bos, eos in product(FORMER_BOS_NAMES, FORMER_EOS_NAMES):
        with suppress(ValueError):
            tokenizer = load_tokenizer(name, bos=bos, eos=eos)
            if tokenizer.fingerprint == fingerprint:
                return tokenizer
    return None


def check_shapes(
    checkpoint: Path, have: Mapping[str, TensorRecord], want: Mapping[str, torch.Size]
) -> None:
    """Raise ``ValueError`` naming a weight whose shapes differ, or that one side lacks."""
    shapes = {fqn: entry.shape for fqn, entry in have.items()}
    for fqn in sorted(shapes.keys() | want.keys()):
        wanted = list(want[fqn]) if fqn in want else "absent"
        if (found := shapes.get(fqn, "absent")) != wanted:
            text = f"tensor {fqn} is {found}, not {wanted}"
            raise ValueError(f"{checkpoint} does not match the model: {text}")


def _build(kind: Any, saved: Mapping[str, Any], prefix: str = "model_args") -> Any:
    """Build the dataclass ``kind`` from a dict; its fields may be dataclasses or None.

    Raises ``ValueError`` that names a field of another type, or with a number out of range.
    """
    values = {f.name: saved[f.name] for f in fields(kind) if f.name in saved}
    known, types = names_of_families(kind), get_type_hints(kind)
    for f in fields(kind):
        if f.name not in values:
            continue
        key, value, annotation = f"{prefix}.{f.name}", values[f.name], types[f.name]
        options = annotation, *get_args(annotation)
        nested = [option for option in options if is_dataclass(option)]
        if nested and isinstance(value, dict):
            values[f.name] = _build(nested[0], value, key)
        elif (wanted := NUMBERS.get(annotation)) is not None:
            # Only models outside of Shardloom have arguments that may be negative.
            least = 0 if f.name in known else -MAX_NUMBER
            is_number = type(value) in wanted and least <= value < MAX_NUMBER
            if not is_number:
                raise ValueError(f"{key}: {reprlib.repr(value)} is not valid")
        elif isinstance(value, list) and any(get_origin(o) is tuple for o in options):
            values[f.name] = _as_tuple(value)
        elif nested and value is not None:
            raise ValueError(f"{key}: {reprlib.repr(value)} is not a table")
    return kind(**values)


def _as_tuple(values: list[Any]) -> tuple[Any, ...]:
    return tuple(_as_tuple(each) if isinstance(each, list) else each for each in values)


def find_checkpoint(path: Path) -> Path:
    """Folder of a checkpoint that verifies: ``path``, or the newest of the run folder ``path``.

    Raises ``ValueError`` if none verifies.
    """
    if is_hub_name(str(path)) or is_hugging_face(path):
        text = "not a checkpoint of Shardloom, but of Hugging Face; this makes one of it"
        raise ValueError(f"{path}: {text}: {command_text('convert', 'import', path, 'CHECKPOINT')}")
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder")
    checkpoints = (
        [path] if (path / MANIFEST_FILE).exists() else list_checkpoints(path / "checkpoints")
    )
    if not checkpoints:
        raise ValueError(
            f"{path}: no checkpoint ({MANIFEST_FILE}), nor a run folder with checkpoints"
        )
    problems: list[str] = []
    for folder in checkpoints:
        found = verify_checkpoint(folder)
        if not found:
            say(*(f"skipped: {problem}" for problem in problems), file=sys.stderr)
            return folder
        problems += found
    raise ValueError(f"{path}: no checkpoint verifies: {'; '.join(problems)}")
