"""Convert checkpoints to Hugging Face folders and back, tensor by tensor and bit for bit.

``shardloom convert export CHECKPOINT FOLDER [--dtype DTYPE]``: for transformers.
``shardloom convert import FOLDER CHECKPOINT``: for ``checkpoint.initial_load_path``.
"""

import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from checkpoint.checkpoint_dir import write_metadata
from checkpoint.hugging_face import (
    CONFIG_FILE,
    SHARD_BYTES,
    Folder,
    new_folder,
    split,
    write_folder,
)
from checkpoint.manifest import read_manifest
from checkpoint.tensor_files import DTYPES, load_single_process, write_tensor_file
from checkpoint.tensor_index import TensorRecord
from config.resume_compat import changed_arguments
from data.tokenizer import TOKENIZER_FILE, load_tokenizer
from data.tokenizer_export import NotRepresentable, TokenizerFiles, build_tokenizer_files
from models import MODEL_SPECS, ModelSpec, TransformerArgs
from runtime import exit_codes
from runtime.log import say
from saved_model import PREFIX, find_checkpoint, saved_model, saved_tokenizer, shapes_of
from tools.cli import Parser, path_argument, path_text, reporting_errors

EXPORT_DTYPES = ("float32", "bfloat16", "float16")


@reporting_errors
def main(arguments: list[str]) -> int:
    parser = Parser("shardloom convert", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("export", help="write a folder that transformers loads").add_argument
    add(
        "checkpoint",
        type=path_argument,
        help="a checkpoint, or a run folder: its newest that verifies",
    )
    add("folder", type=path_argument, help="folder to write; must not exist")
    add(
        "--tokenizer",
        type=path_text,
        metavar="NAME",
        help="the run's tokenizer, if its file has moved",
    )
    add("--dtype", choices=EXPORT_DTYPES, help="dtype of all weights; default: as saved")
    add("--model", metavar="MODULE:ATTRIBUTE", help="the run's model.name, if outside of Shardloom")
    add = commands.add_parser("import", help="read a folder with safetensors").add_argument
    add("folder", type=path_argument, help="folder with config.json and safetensors")
    add("checkpoint", type=path_argument, help="checkpoint to write; must not exist")
    options = parser.parse_args(arguments)
    if options.command == "export":
        export_checkpoint(
            options.checkpoint,
            options.folder,
            tokenizer_name=options.tokenizer,
            dtype=getattr(torch, options.dtype) if options.dtype else None,
            model_name=options.model,
        )
    else:
        import_folder(options.folder, options.checkpoint)
    return exit_codes.DONE


def export_checkpoint(
    checkpoint: Path,
    folder: Path,
    *,
    tokenizer_name: str | None = None,
    dtype: torch.dtype | None = None,
    model_name: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the weights of a checkpoint, saved on any mesh, as a new Hugging Face folder.

    ``dtype``: of all weights; None: that in which each was saved. Raises ``ValueError`` if the
    checkpoint does not verify, if its model has no Hugging Face format, if the written tokenizer
    would encode otherwise, or if a weight exceeds the range of ``dtype``.
    """
    checkpoint = find_checkpoint(checkpoint)
    manifest = read_manifest(checkpoint)
    model = saved_model(checkpoint, manifest, model_name)
    weights, family = model.weights, model.spec.hugging_face
    if family is None:
        raise ValueError(f"{checkpoint}: {model.name} has no Hugging Face format")
    pairs = family.tensors(model.args)
    written = _tokenizer_files(checkpoint, manifest, tokenizer_name)
    saved = [DTYPES[weights[pair.fqn].dtype] for pair in pairs if pair.hf_names]
    dtype_name = str(dtype or reduce(torch.promote_types, saved)).removeprefix("torch.")
    config = {**family.config(model.args), **written.ids}
    config |= {"dtype": dtype_name, "torch_dtype": dtype_name}

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for pair in pairs:
            if pair.tied_to is None:
                weight = _read_weight(checkpoint, pair.fqn, weights[pair.fqn])
                yield from ((name, _cast(name, part, dtype)) for name, part in split(pair, weight))

    write_folder(folder, config, tensors(), files=written.files, shard_bytes=shard_bytes)
    say(f"{folder}: {config['architectures'][0]}, {config['dtype']}, step {manifest['step']}")


def _read_weight(checkpoint: Path, fqn: str, entry: TensorRecord) -> torch.Tensor:
    key = PREFIX + fqn
    state = {key: torch.empty(entry.shape, dtype=DTYPES[entry.dtype])}
    load_single_process(state, checkpoint, {key: entry})
    return state[key]


def _cast(name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if dtype is None:
        return tensor
    cast = tensor.to(dtype)
    if not torch.equal(cast.isfinite(), tensor.isfinite()):
        raise ValueError(f"argument --dtype: {name} has values beyond the range of {dtype}")
    return cast


def _tokenizer_files(
    checkpoint: Path, manifest: Mapping[str, Any], name: str | None
) -> TokenizerFiles:
    """Files of the run's tokenizer; none if the checkpoint names none."""
    found = saved_tokenizer(checkpoint, manifest, name)
    if found is None:
        say("tokenizer: not written, the checkpoint names none and --tokenizer is not set")
        return TokenizerFiles({}, {"bos_token_id": None, "eos_token_id": None})
    name, tokenizer = found
    path = Path(name)
    companion = path.with_name(f"{path.name}.json")
    # The run's own file and its pattern also identify the tokenizer of the checkpoint.
    paths = [each for each in (path, companion) if path.suffix == ".tiktoken" and each.is_file()]
    own = {each.name: each.read_bytes() for each in paths}
    try:
        written = build_tokenizer_files(name, tokenizer)
    except NotRepresentable as error:
        say(f"tokenizer: AutoTokenizer cannot load this folder, no tokenizer.json: {error}")
        ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
        return TokenizerFiles(own, ids)
    return replace(written, files={**written.files, **own})


def import_folder(folder: Path, checkpoint: Path, *, file_bytes: int = SHARD_BYTES) -> None:
    """Write the weights of a Hugging Face folder as a new checkpoint of step 0.

    Writes files of at most ``file_bytes``. Raises ``ValueError`` for an unsupported model, for
    missing or unknown tensors and for damaged files.
    """
    source = Folder(folder)
    model_type = source.config.get("model_type")
    families = {s.hugging_face.model_type: n for n, s in MODEL_SPECS.items() if s.hugging_face}
    name = families.get(model_type) if isinstance(model_type, str) else None
    if name is None:
        known = ", ".join(families)
        raise ValueError(f"{folder}: model_type: {model_type!r} is not one of {known}")
    spec, family = MODEL_SPECS[name], MODEL_SPECS[name].hugging_face
    assert family is not None
    try:
        args = family.args(source.config)
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG_FILE}: {error}") from None
    if args.n_layers * getattr(args, "n_experts", 1) > len(source.names):
        raise ValueError(f"{folder}: {len(source.names)} tensors for {args.n_layers} layers")
    pairs, (shapes, _) = family.tensors(args), shapes_of(spec, args)
    source.check(family, args, shapes)
    metadata = _metadata(folder, name, spec, args)
    by_name = {pair.fqn: pair for pair in pairs}
    # A tied tensor is read from the one whose weight it shares.
    sources = {pair.fqn: by_name[pair.tied_to or pair.fqn] for pair in pairs}
    items = [_item(fqn, shapes[fqn], source.dtype(pair)) for fqn, pair in sources.items()]

    def read(item: WriteItem) -> torch.Tensor:
        fqn = item.index.fqn.removeprefix(PREFIX)
        return source.read_box(sources[fqn], [0] * len(shapes[fqn]), shapes[fqn])

    with new_folder(checkpoint) as scratch:
        parts = {}
        # Several files, so that several ranks can share the work of verifying them.
        for number, group in enumerate(_groups(items, file_bytes)):
            file = f"part-{number:05d}.bin"
            parts[file] = write_tensor_file(scratch / file, group, read)
        write_metadata(scratch, parts, state={}, metadata=metadata)
    say(f"{checkpoint}: {name}, for checkpoint.initial_load_path")


def _item(fqn: str, shape: torch.Size, dtype: torch.dtype) -> WriteItem:
    """DCP write item of a whole tensor."""
    start = torch.Size([0] * len(shape))
    data = TensorWriteData(
        ChunkStorageMetadata(start, shape), TensorProperties(dtype=dtype), size=shape
    )
    return WriteItem(MetadataIndex(PREFIX + fqn, start), WriteItemType.TENSOR, tensor_data=data)


def _groups(items: Iterable[WriteItem], file_bytes: int) -> Iterator[list[WriteItem]]:
    """Split items into groups of at most ``file_bytes``, or of one larger item."""
    group: list[WriteItem] = []
    size = 0
    for item in items:
        assert item.tensor_data is not None
        n_bytes = item.tensor_data.size.numel() * item.tensor_data.properties.dtype.itemsize
        if group and size + n_bytes > file_bytes:
            yield group
            group, size = [], 0
        group.append(item)
        size += n_bytes
    yield group


def _metadata(folder: Path, name: str, spec: ModelSpec, args: TransformerArgs) -> dict[str, Any]:
    """Manifest metadata for a checkpoint that no run saved."""
    flavors = (
        flavor
        for flavor, published in spec.flavors.items()
        if not changed_arguments(asdict(args), replace(published, vocab_size=args.vocab_size))
    )
    config: dict[str, Any] = {
        "model": {"name": name, "flavor": next(flavors, None), "vocab_size": args.vocab_size}
    }
    metadata: dict[str, Any] = {"config": config, "model_args": asdict(args)}
    path = folder / TOKENIZER_FILE
    if path.exists():
        try:
            metadata["fingerprints"] = {"tokenizer": load_tokenizer(str(path)).fingerprint}
            config["data"] = {"tokenizer": str(path.absolute())}
        except ValueError as error:
            say(f"tokenizer: skipped: {error}")
    attempt = uuid.uuid4().hex
    lineage = {"run": attempt, "parent": None, "attempt": attempt}
    return {"step": 0, "world_size": 1, **lineage, **metadata}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
