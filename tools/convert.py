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
    check_pairs,
    new_folder,
    split,
    write_folder,
)
from checkpoint.manifest import read_manifest
from checkpoint.tensor_files import DTYPES, lay_out, load_single_process, write_tensor_file
from checkpoint.tensor_index import TensorRecord, index_content, write_index
from config.hub_names import WEIGHT_FILES, is_hub_name
from config.resume_compat import changed_arguments
from data.rank_files import companion_of
from data.tokenizer import TokenizerFile, find_tokenizer_file, load_tokenizer
from data.tokenizer_export import NotRepresentable, TokenizerFiles, build_tokenizer_files
from models import MODEL_SPECS, ModelSpec, TransformerArgs, find_family
from models.arguments import SET_BY
from runtime import exit_codes
from runtime.hub_paths import local_path, pinned_name
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
    add("folder", type=path_text, help="folder with config.json and safetensors, or hf:OWNER/NAME")
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
        folder = local_path(options.folder, WEIGHT_FILES, key="argument folder")
        is_hub = is_hub_name(options.folder)
        name = str(pinned_name(options.folder, folder)) if is_hub else None
        import_folder(Path(folder), options.checkpoint, tokenizer_name=name)
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
    check_pairs(pairs, weights)
    written = _tokenizer_files(checkpoint, manifest, tokenizer_name)
    saved = [DTYPES[weights[pair.fqn].dtype] for pair in pairs if pair.hf_names]
    dtype_name = str(dtype or reduce(torch.promote_types, saved)).removeprefix("torch.")
    config = family.config(model.args)
    read = vars(family.args(config))
    # Arguments that keys of training set are no part of the model.
    own = {name: value for name, value in vars(model.args).items() if name not in SET_BY}
    if lost := sorted(n for n, value in own.items() if n not in read or read[n] != value):
        text = f"no key of {config['architectures'][0]} has this argument of the model"
        raise ValueError(f"{model.name}: {', '.join(lost)}: {text}")
    if model.name not in MODEL_SPECS and family in (s.hugging_face for s in MODEL_SPECS.values()):
        name = config["architectures"][0]
        say(f"{model.name}: readers run the code of {name}: compare its logits with the model's")
    config |= written.ids
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
    # The run's own file and its pattern also identify the tokenizer of the checkpoint.
    file = find_tokenizer_file(name)
    own = {} if file is None else _own_files(file)
    try:
        written = build_tokenizer_files(name, tokenizer)
    except NotRepresentable as error:
        say(f"tokenizer: AutoTokenizer cannot load this folder, no tokenizer.json: {error}")
        ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
        return TokenizerFiles(own, ids)
    is_ranks = file is not None and file.kind == "ranks"
    return replace(written, files={**written.files, **own}) if is_ranks else written


def _own_files(file: TokenizerFile) -> dict[str, bytes]:
    """A rank file with its companion, or a SentencePiece model.

    Under names from which transformers does not make a tokenizer, which may be another one.
    """
    if file.kind == "json":
        return {}
    suffix = ".tiktoken" if file.kind == "ranks" else ".sentencepiece"
    name, companion = file.path.with_suffix(suffix).name, companion_of(file.path)
    own = {name: file.path.read_bytes()}
    return own | ({f"{name}.json": companion.read_bytes()} if companion.is_file() else {})


def import_folder(
    folder: Path,
    checkpoint: Path,
    *,
    tokenizer_name: str | None = None,
    file_bytes: int = SHARD_BYTES,
) -> None:
    """Write the weights of a Hugging Face folder as a new checkpoint of step 0.

    ``tokenizer_name``: of its tokenizer; None: that of its file. Writes files of at most
    ``file_bytes``. Raises ``ValueError`` for an unsupported model, for
    missing or unknown tensors and for damaged files.
    """
    source = Folder(folder)
    try:
        name = find_family(source.config)
    except ValueError as error:
        own = "a model of your own reads the folder as checkpoint.initial_load_path"
        raise ValueError(f"{folder}: {error}; {own}") from None
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
    metadata = _metadata(folder, name, spec, args, tokenizer_name)
    by_name = {pair.fqn: pair for pair in pairs}
    # A tied tensor is read from the one whose weight it shares.
    sources = {pair.fqn: by_name[pair.tied_to or pair.fqn] for pair in pairs}
    items = [_item(fqn, shapes[fqn], source.dtype(pair)) for fqn, pair in sources.items()]

    def read(item: WriteItem) -> torch.Tensor:
        fqn = item.index.fqn.removeprefix(PREFIX)
        return source.read_box(sources[fqn], [0] * len(shapes[fqn]), shapes[fqn])

    with new_folder(checkpoint) as scratch:
        # Several files, so that several ranks can share the work of verifying them.
        groups = {f"part-{n:05d}.bin": group for n, group in enumerate(_groups(items, file_bytes))}
        files = {name: write_tensor_file(scratch / name, g, read) for name, g in groups.items()}
        index = index_content(lay_out(name, group) for name, group in groups.items())
        files |= write_index(scratch, index)
        write_metadata(scratch, files, state={}, metadata=metadata)
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


def _metadata(
    folder: Path, name: str, spec: ModelSpec, args: TransformerArgs, tokenizer_name: str | None
) -> dict[str, Any]:
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
    try:
        file = find_tokenizer_file(str(folder.absolute()))
        assert file is not None, "a folder names a file"
        metadata["fingerprints"] = {"tokenizer": load_tokenizer(str(file.path)).fingerprint}
        config["data"] = {"tokenizer": tokenizer_name or str(file.path.absolute())}
    except ValueError as error:
        say(f"tokenizer: skipped: {error}")
    attempt = uuid.uuid4().hex
    lineage = {"run": attempt, "parent": None, "attempt": attempt}
    return {"step": 0, "world_size": 1, **lineage, **metadata}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
