"""Hugging Face folders: ``config.json`` and safetensors, memory-mapped and written in shards.

Pickles (``pytorch_model.bin``) can run code and are not read. Symlinks to regular files are
followed, because the Hub's cache consists of them.
"""

import hashlib
import json
import math
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import reduce
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from checkpoint.checkpointer import Stateful
from checkpoint.manifest import FILE_NAME, MANIFEST_FILE
from checkpoint.tensor_files import Reader
from config import ConfigError
from config.resume_compat import changed_arguments
from runtime.filesystem import fsync_folder, open_input, read_input
from runtime.log import logger
from runtime.object_collectives import gather_to_rank0, raise_if_unequal, run_on_rank0
from runtime.printable import reason_of

CONFIG_FILE = "config.json"
SAFETENSORS_FILE = "model.safetensors"
SAFETENSORS_INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt"}
SHARD_BYTES = 5_000_000_000
# A larger header is hashed in part.
FINGERPRINT_BYTES = 1 << 20
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Pair(Protocol):
    """Protocol of ``models.hugging_face.TensorPair``."""

    @property
    def fqn(self) -> str: ...
    @property
    def hf_names(self) -> tuple[str, ...]: ...
    @property
    def is_stacked(self) -> bool: ...
    @property
    def to_hf(self) -> Callable[[torch.Tensor], torch.Tensor] | None: ...
    @property
    def from_hf(self) -> Callable[[torch.Tensor], torch.Tensor] | None: ...
    @property
    def tied_to(self) -> str | None: ...


class Family(Protocol):
    """Protocol of ``models.hugging_face.HuggingFace``."""

    @property
    def config(self) -> Callable[[Any], dict[str, Any]]: ...
    @property
    def args(self) -> Callable[[Mapping[str, Any]], Any]: ...
    @property
    def tensors(self) -> Callable[[Any], Sequence[Pair]]: ...
    @property
    def defaults(self) -> Callable[[Mapping[str, Any]], dict[str, Any]]: ...
    @property
    def skipped_kind(self) -> Callable[[str, int], str]: ...


def is_hugging_face(path: Path) -> bool:
    """True if ``path`` is a Hugging Face folder and not a Shardloom checkpoint."""
    return (path / CONFIG_FILE).exists() and not (path / MANIFEST_FILE).exists()


def load_weights(path: Path, model: Stateful, family: Family | None, args: Any) -> None:
    """Load a folder's weights into a model with ``args``, on any mesh.

    Collective. Mutates ``model``. Each rank reads only its own shards. Raises ``ConfigError`` if
    the folder is unreadable, does not match the model, or differs between ranks.
    """
    if family is None:
        raise ConfigError(
            ["checkpoint.initial_load_path: this model.name has no Hugging Face format"]
        )
    state = model.state_dict()
    opened: list[Folder] = []

    def problems() -> list[str]:
        try:
            opened.append(open_checked(path, family, args, {k: t.shape for k, t in state.items()}))
        except ConfigError as error:
            return error.messages
        except ValueError as error:
            return [str(error)]
        return []

    answers = gather_to_rank0(problems)
    found = run_on_rank0(lambda: list(dict.fromkeys(text for answer in answers for text in answer)))
    if found:
        raise ConfigError([f"checkpoint.initial_load_path: {text}" for text in found])
    raise_if_unequal({f"checkpoint.initial_load_path {path}": opened[0].fingerprint})
    pairs = {pair.fqn: pair for pair in family.tensors(args)}
    dcp.load(state, storage_reader=HuggingFaceReader(opened[0], pairs, state))
    model.load_state_dict(state)


def open_checked(
    path: Path, family: Family, args: Any, shapes: Mapping[str, torch.Size]
) -> "Folder":
    """Open a folder; raise ``ValueError`` if it does not match a model with ``args``.

    ``shapes``: FQN to shape of the Shardloom tensors to be read.
    """
    folder = Folder(path)
    try:
        found = family.args(folder.config)
    except ValueError as error:
        raise ValueError(f"{path / CONFIG_FILE}: {error}") from None
    # The round trip drops the args that config.json cannot express, such as how to train.
    different = changed_arguments(asdict(found), family.args(family.config(args)))
    if found.vocab_size != args.vocab_size:
        different.append(
            f"set model.vocab_size = {found.vocab_size}, if data.tokenizer is this model's"
        )
    if different:
        raise ValueError(f"{path / CONFIG_FILE} does not match the model: {'; '.join(different)}")
    folder.check(family, args, shapes)
    return folder


class Folder:
    """A Hugging Face folder: its ``config`` and its tensors, which are memory-mapped.

    Raises ``ValueError`` if files are missing, damaged or inconsistent, or if all are pickles.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.config = _read_json_object(path / CONFIG_FILE)
        self._files: dict[str, Any] = {}
        files = _expected_names(path)
        opened = {file: _open(path / file) for file in files}
        for file, names in files.items():
            stored = set(opened[file].keys())
            for name in sorted(stored ^ (stored if names is None else names)):
                where = "the file" if name in stored else SAFETENSORS_INDEX_FILE
                raise ValueError(f"{path / file}: {name} is in {where} only")
            self._files |= dict.fromkeys(stored, opened[file])

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self._files.keys()

    @property
    def fingerprint(self) -> str:
        """Hash of every file's name, size, first and last bytes: its header and some weights."""
        digest = hashlib.sha256()
        for name in sorted(_expected_names(self._path)):
            with (self._path / name).open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                digest.update(f"{name} {size} ".encode())
                for offset in (0, max(0, size - FINGERPRINT_BYTES)):
                    file.seek(offset)
                    digest.update(file.read(FINGERPRINT_BYTES))
        return digest.hexdigest()

    def check(self, family: Family, args: Any, shapes: Mapping[str, torch.Size]) -> None:
        """Raise ``ValueError`` unless the folder has exactly the tensors of a model with ``args``.

        ``shapes``: FQN to shape of the Shardloom tensors that they must convert to.
        """
        pairs = family.tensors(args)
        by_name = {pair.fqn: pair for pair in pairs}
        known = {name: pair for pair in pairs for name in pair.hf_names}
        missing = [n for n, pair in known.items() if n not in self._files and pair.tied_to is None]
        extra = sorted(self._files.keys() - known.keys())
        skipped = {name: family.skipped_kind(name, len(self._shape(name))) for name in extra}
        extra = [name for name in extra if not skipped[name]]
        found = [f"{self._path}: {n} is missing ({len(missing)} in all)" for n in missing[:1]]
        found += [f"{self._path}: {n} is unknown ({len(extra)} in all)" for n in extra[:1]]
        for fqn, shape in shapes.items():
            wanted = split(by_name[fqn], torch.empty(shape, device="meta"))
            found += [self._mismatch(name, t.shape) for name, t in wanted if name in self._files]
        for pair in pairs:
            if pair.tied_to is None or pair.hf_names[0] not in self._files or missing:
                continue
            one, other = pair.hf_names[0], by_name[pair.tied_to].hf_names[0]
            if _bitwise_equal(self.read(one), self.read(other)):
                skipped[one] = f"{one}, tied and equal"
            else:
                found.append(f"{self._path}: {one} and {other} are tied, but not equal")
        found = [text for text in found if text]
        if found:
            raise ConfigError(found[:3])
        self._log(family.defaults(self.config), Counter(skipped.values()))

    def _log(self, defaults: Mapping[str, Any], skipped: Mapping[str, int]) -> None:
        """Log the keys that were taken as defaults, and each kind of tensor that was skipped."""
        if defaults:
            logger.warning(
                "%s: taking transformers' defaults of absent keys: %s", self._path / CONFIG_FILE,
                ", ".join(f"{key} = {json.dumps(value)}" for key, value in defaults.items()),
            )  # fmt: skip
        for kind, count in skipped.items():
            logger.warning(
                "%s: skipped %d tensors %s, which the Shardloom model lacks",
                self._path, count, kind,
            )  # fmt: skip

    def _shape(self, name: str) -> list[int]:
        return self._files[name].get_slice(name).get_shape()

    def _mismatch(self, name: str, shape: torch.Size) -> str:
        tensor = self.read(name)
        if tensor.dtype not in DTYPES:
            return f"{self._path}: {name} is {tensor.dtype}, an unsupported dtype"
        if tensor.shape != shape:
            return f"{self._path}: {name} is {list(tensor.shape)}, not {list(shape)}"
        return ""

    def read(self, name: str) -> torch.Tensor:
        """Map a Hugging Face tensor; its bytes are read when they are used."""
        try:
            return self._files[name].get_tensor(name)
        except (SafetensorError, RuntimeError, TypeError, AttributeError) as error:
            raise ValueError(f"{self._path}: {name}: {error}") from None

    def dtype(self, pair: Pair) -> torch.dtype:
        """Dtype of a Shardloom tensor: ``torch.promote_types`` of its Hugging Face tensors."""
        dtypes = [self.read(name).dtype for name in pair.hf_names]
        return reduce(torch.promote_types, dtypes, dtypes[0]) if dtypes else torch.float32

    def read_box(self, pair: Pair, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Read a box of a Shardloom tensor; without a conversion, only that box is read."""
        if not pair.hf_names or math.prod(sizes) == 0:
            return torch.zeros(list(sizes))
        if not pair.is_stacked:
            return _box(self._converted(pair, pair.hf_names[0]), offsets, sizes)
        names = pair.hf_names[offsets[0] : offsets[0] + sizes[0]]
        rows = [_box(self._converted(pair, name), offsets[1:], sizes[1:]) for name in names]
        return torch.stack(rows)

    def _converted(self, pair: Pair, name: str) -> torch.Tensor:
        tensor = self.read(name)
        return tensor if pair.from_hf is None else pair.from_hf(tensor)


class HuggingFaceReader(Reader):
    """DCP ``StorageReader`` for a checked folder; ``wanted`` are Shardloom tensors by FQN."""

    def __init__(
        self, folder: Folder, pairs: Mapping[str, Pair], wanted: Mapping[str, torch.Tensor]
    ) -> None:
        # A tied tensor is read from the one whose weight it shares.
        self._pairs = {fqn: pairs[pairs[fqn].tied_to or fqn] for fqn in wanted}
        self._source, self._wanted = folder, wanted

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({fqn: _whole(tensor) for fqn, tensor in self._wanted.items()})

    def set_up_storage_reader(self, metadata: Metadata, *args: Any, **kwargs: Any) -> None:
        pass

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            pair = self._pairs[item.storage_index.fqn]
            target = planner.resolve_tensor(item).detach()
            target.copy_(self._source.read_box(pair, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def split(pair: Pair, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Convert one Shardloom tensor to Hugging Face (name, tensor) pairs.

    Raises ``ValueError`` if it has no Hugging Face counterpart and is not zero.
    """
    if not pair.hf_names:
        if not tensor.is_meta and tensor.any():
            raise ValueError(f"{pair.fqn} is not zero, and has no Hugging Face counterpart")
        return
    rows = tensor.unbind() if pair.is_stacked else [tensor]
    for name, row in zip(pair.hf_names, rows, strict=True):
        yield name, row if pair.to_hf is None else pair.to_hf(row)


def write_folder(
    path: Path,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    files: Mapping[str, bytes],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a new Hugging Face folder with ``tensors`` and further ``files``.

    Holds one file's tensors in memory at a time. Raises ``ValueError`` if ``path`` exists.
    """
    with new_folder(path) as scratch:
        sizes: list[dict[str, int]] = []
        for shard in _shards(tensors, shard_bytes):
            try:
                save_file(shard, scratch / f"{len(sizes)}.part", metadata={"format": "pt"})
            except SafetensorError as error:  # no OSError, also of a full disk
                raise OSError(f"{path}: {error}") from None
            sizes.append({name: tensor.nbytes for name, tensor in shard.items()})
            # Free its memory before the next shard is built.
            shard.clear()
        # Shards are named last, because each name contains their number.
        names = [f"model-{i + 1:05d}-of-{len(sizes):05d}.safetensors" for i in range(len(sizes))]
        if len(sizes) == 1:
            names = [SAFETENSORS_FILE]
        else:
            weight_map = {t: name for name, part in zip(names, sizes, strict=True) for t in part}
            total = sum(sum(part.values()) for part in sizes)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (scratch / SAFETENSORS_INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
        for number, name in enumerate(names):
            (scratch / f"{number}.part").rename(scratch / name)
        for name, data in files.items():
            (scratch / name).write_bytes(data)
        (scratch / CONFIG_FILE).write_text(json.dumps(dict(config), indent=2) + "\n")


def _shards(
    tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int
) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        # Cloned, because safetensors rejects tensors that share memory.
        shard[name] = tensor.clone(memory_format=torch.contiguous_format)
        size += tensor.nbytes
    yield shard


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder; on success, fsync it and rename it to ``path``, else delete it.

    Raises ``ValueError`` if ``path`` exists.
    """
    if path.exists() or path.is_symlink():
        raise ValueError(f"{path}: already exists, and nothing is overwritten")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    scratch = path.with_name(f".tmp-{path.name}-{uuid.uuid4().hex[:8]}")
    scratch.mkdir(mode=0o700)
    try:
        yield scratch
        for file in scratch.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        fsync_folder(scratch)
        scratch.rename(path)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    fsync_folder(path.parent)


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_input(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {reason_of(error)}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not a JSON object")
    return content


def _expected_names(path: Path) -> dict[str, set[str] | None]:
    """Safetensors files, and the tensor names that the index lists for each; None: no index."""
    has_single, has_index = (
        (path / SAFETENSORS_FILE).exists(),
        (path / SAFETENSORS_INDEX_FILE).exists(),
    )
    if has_single and has_index:
        raise ValueError(
            f"{path}: both {SAFETENSORS_FILE} and {SAFETENSORS_INDEX_FILE}; delete one"
        )
    if has_single:
        return {SAFETENSORS_FILE: None}
    if not has_index:
        pickles = sorted(file.name for file in path.glob("*.*") if file.suffix in PICKLE_SUFFIXES)
        hints = [
            f"; {name} is a pickle, which could run code and is not read" for name in pickles[:1]
        ]
        raise ValueError(
            f"{path}: no {SAFETENSORS_FILE} or {SAFETENSORS_INDEX_FILE}{''.join(hints)}"
        )
    weight_map = _read_json_object(path / SAFETENSORS_INDEX_FILE).get("weight_map")
    files: dict[str, set[str] | None] = {}
    for name, file in weight_map.items() if isinstance(weight_map, dict) else ():
        if not isinstance(file, str) or not FILE_NAME.fullmatch(file):
            raise ValueError(f"{path / SAFETENSORS_INDEX_FILE}: {file!r} is not a plain file name")
        files[file] = (files.get(file) or set()) | {name}
    if not files:
        raise ValueError(f"{path / SAFETENSORS_INDEX_FILE}: no weight_map")
    return files


def _open(path: Path) -> Any:
    try:
        # Raises for a pipe, on which safe_open would block.
        open_input(path).close()
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: {reason_of(error)}") from None


def check_pairs(pairs: Sequence[Pair], names: Collection[str]) -> None:
    """Raise ``ConfigError`` unless ``pairs`` has each of ``names``, a model's tensors, once.

    A family of the user's own may list others than its model has.
    """
    listed = {pair.fqn for pair in pairs}
    counts = Counter(name for pair in pairs for name in pair.hf_names)
    lacks = [f"lacks {name}" for name in names if name not in listed]
    other = [
        f"lists {pair.fqn}, which the model lacks"
        for pair in pairs
        if pair.tied_to is None and pair.fqn not in names
    ]
    twice = [f"gives two tensors the name {name}" for name, count in counts.items() if count > 1]
    found = [f"{some[0]} ({len(some)} in all)" for some in (lacks, other, twice) if some]
    if found:
        raise ConfigError([f"the model's Hugging Face table {text}" for text in found])


def _bitwise_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    has_same_type = (one.dtype, one.shape) == (other.dtype, other.shape)
    return has_same_type and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _box(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def _whole(tensor: torch.Tensor) -> TensorStorageMetadata:
    """Metadata of ``tensor`` as one chunk, with the model's dtype; the file's may differ."""
    chunk = ChunkStorageMetadata(torch.Size([0] * tensor.ndim), tensor.shape)
    return TensorStorageMetadata(TensorProperties(tensor.dtype), tensor.shape, [chunk])
