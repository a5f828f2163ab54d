"""Hugging Face folders: ``config.json`` and safetensors, read in place and written in shards.

A pickle (``pytorch_model.bin``) is a program, and is not read. Links are followed, because the
Hub's cache is made of them, but only to plain files.
"""

import json
import math
import os
import shutil
import uuid
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
from checkpoint.manifest import FILE_NAME, NAME, sync_folder
from checkpoint.storage import Reader, open_file, read_file
from config import ConfigError
from config.changes import changed_arguments
from runtime.log import logger
from runtime.together import gather, on_first

CONFIG_FILE, TOKENIZER_FILE = "config.json", "tokenizer.json"
WHOLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLES = {".bin", ".pt", ".pth", ".ckpt"}
SHARD_BYTES = 5_000_000_000
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Pair(Protocol):
    """``models.hugging_face.TensorPair``."""

    @property
    def ours(self) -> str: ...
    @property
    def theirs(self) -> tuple[str, ...]: ...
    @property
    def is_stacked(self) -> bool: ...
    @property
    def to_theirs(self) -> Callable[[torch.Tensor], torch.Tensor] | None: ...
    @property
    def to_ours(self) -> Callable[[torch.Tensor], torch.Tensor] | None: ...
    @property
    def shares(self) -> str | None: ...


class Family(Protocol):
    """``models.hugging_face.HuggingFace``."""

    @property
    def config(self) -> Callable[[Any], dict[str, Any]]: ...
    @property
    def args(self) -> Callable[[Mapping[str, Any]], Any]: ...
    @property
    def tensors(self) -> Callable[[Any], Sequence[Pair]]: ...
    @property
    def left_out(self) -> str: ...


def is_hugging_face(path: Path) -> bool:
    return (path / CONFIG_FILE).exists() and not (path / NAME).exists()


def load_weights(path: Path, model: Stateful, family: Family | None, args: Any) -> None:
    """Fill ``model``, which has ``args`` and is spread over any mesh, with a folder's weights.

    Each rank reads its own parts. Raises ``ConfigError`` unless the folder is of this very model. A
    collective.
    """
    if family is None:
        raise ConfigError(["checkpoint.initial_load_path: no Hugging Face form of this model.name"])
    state = model.state_dict()
    opened: list[Folder] = []

    def problems() -> list[str]:
        try:
            opened.append(open_as(path, family, args, {k: t.shape for k, t in state.items()}))
        except ValueError as error:
            return str(error).splitlines()
        return []

    answers = gather(problems)
    found = on_first(lambda: list(dict.fromkeys(text for answer in answers for text in answer)))
    if found:
        raise ConfigError([f"checkpoint.initial_load_path: {text}" for text in found])
    pairs = {pair.ours: pair for pair in family.tensors(args)}
    dcp.load(state, storage_reader=FolderReader(opened[0], pairs, state))
    model.load_state_dict(state)


def open_as(path: Path, family: Family, args: Any, shapes: Mapping[str, torch.Size]) -> "Folder":
    """Open the folder of a model with ``args``; ``shapes``: of those tensors of ours to be read.

    ``ValueError`` if the folder is of another model.
    """
    folder = Folder(path)
    try:
        theirs = family.args(folder.config)
    except ValueError as error:
        raise ValueError(f"{path / CONFIG_FILE}: {error}") from None
    # Our args to their config and back: what it cannot say, such as how to train, is not compared.
    different = changed_arguments(asdict(theirs), family.args(family.config(args)))
    if theirs.vocab_size != args.vocab_size:
        different.append(
            f"set model.vocab_size = {theirs.vocab_size}, if data.tokenizer is this model's"
        )
    if different:
        raise ValueError(f"{path / CONFIG_FILE} is of another model: {'; '.join(different)}")
    folder.check(family, args, shapes)
    return folder


class Folder:
    """A folder of theirs: its ``config``, and its tensors, which are read where they lie.

    Raises ``ValueError`` if it is no such folder, is torn, or has nothing but pickles.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.config = _read_table(path / CONFIG_FILE)
        self._files: dict[str, Any] = {}
        files = _files_of(path)
        opened = {file: _open(path / file) for file in files}
        for file, names in files.items():
            there = set(opened[file].keys())
            for name in sorted(there ^ (there if names is None else names)):
                where = "the file" if name in there else INDEX_FILE
                raise ValueError(f"{path / file}: {name} is in {where} only")
            self._files |= dict.fromkeys(there, opened[file])

    @property
    def names(self) -> Collection[str]:
        return self._files.keys()

    def check(self, family: Family, args: Any, shapes: Mapping[str, torch.Size]) -> None:
        """Raise ``ValueError`` unless the tensors are those of the family's model with ``args``,
        and convert to tensors of ours with these ``shapes``."""
        pairs = family.tensors(args)
        by_name = {pair.ours: pair for pair in pairs}
        assert shapes.keys() <= by_name.keys(), "the table has every tensor of the model"
        known = {name: pair for pair in pairs for name in pair.theirs}
        missing = [n for n, pair in known.items() if n not in self._files and pair.shares is None]
        extra = sorted(self._files.keys() - known.keys())
        if family.left_out:
            kept = [name for name in extra if not name.startswith(family.left_out)]
            if len(kept) < len(extra):
                logger.warning("%s: left out: %d tensors %s*, which are no part of the model here",
                               self._path, len(extra) - len(kept), family.left_out)  # fmt: skip
            extra = kept
        found = [f"{self._path}: {n} is missing (of {len(missing)} tensors)" for n in missing[:1]]
        found += [f"{self._path}: {n} is unknown (of {len(extra)} tensors)" for n in extra[:1]]
        for ours, shape in shapes.items():
            wanted = split(by_name[ours], torch.empty(shape, device="meta"))
            found += [self._fault(name, t.shape) for name, t in wanted if name in self._files]
        for pair in pairs:
            if pair.shares is not None and pair.theirs[0] in self._files and not missing:
                one, other = pair.theirs[0], by_name[pair.shares].theirs[0]
                if not _are_equal(self.read(one), self.read(other)):
                    found.append(f"{self._path}: {one} and {other} are tied, but not equal")
        found = [text for text in found if text]
        if found:
            raise ValueError("\n".join(found[:3]))

    def _fault(self, name: str, shape: torch.Size) -> str:
        tensor = self.read(name)
        if tensor.dtype not in DTYPES:
            return f"{self._path}: {name} is {tensor.dtype}, which is not trained"
        if tensor.shape != shape:
            return f"{self._path}: {name} is {list(tensor.shape)}, not {list(shape)}"
        return ""

    def read(self, name: str) -> torch.Tensor:
        """A tensor of theirs, in place: its bytes are read when they are used."""
        try:
            return self._files[name].get_tensor(name)
        except (SafetensorError, RuntimeError, TypeError, AttributeError) as error:
            raise ValueError(f"{self._path}: {name}: {error}") from None

    def dtype(self, pair: Pair) -> torch.dtype:
        """The dtype to read a tensor of ours in: that which its tensors of theirs promote to."""
        dtypes = [self.read(name).dtype for name in pair.theirs]
        return reduce(torch.promote_types, dtypes, dtypes[0]) if dtypes else torch.float32

    def read_ours(self, pair: Pair, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """A box of a tensor of ours; where nothing is converted, only that box is read."""
        if not pair.theirs or math.prod(sizes) == 0:
            return torch.zeros(list(sizes))
        if not pair.is_stacked:
            return _box(self._converted(pair, pair.theirs[0]), offsets, sizes)
        names = pair.theirs[offsets[0] : offsets[0] + sizes[0]]
        rows = [_box(self._converted(pair, name), offsets[1:], sizes[1:]) for name in names]
        return torch.stack(rows)

    def _converted(self, pair: Pair, name: str) -> torch.Tensor:
        tensor = self.read(name)
        return tensor if pair.to_ours is None else pair.to_ours(tensor)


class FolderReader(Reader):
    """DCP's way into a folder that was checked, for the tensors ``wanted`` of ours."""

    def __init__(
        self, folder: Folder, pairs: Mapping[str, Pair], wanted: Mapping[str, torch.Tensor]
    ) -> None:
        # A tensor that shares another's weight is read from there.
        self._pairs = {ours: pairs[pairs[ours].shares or ours] for ours in wanted}
        self._source, self._wanted = folder, wanted

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({ours: _whole(tensor) for ours, tensor in self._wanted.items()})

    def set_up_storage_reader(self, metadata: Metadata, *args: Any, **kwargs: Any) -> None:
        pass

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            pair = self._pairs[item.storage_index.fqn]
            target = planner.resolve_tensor(item).detach()
            target.copy_(self._source.read_ours(pair, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def split(pair: Pair, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that one of ours becomes in their files, each with its name.

    Raises ``ValueError`` if it has no place there and is not zero.
    """
    if not pair.theirs:
        if not tensor.is_meta and tensor.any():
            raise ValueError(f"{pair.ours} is not zero, and has no place in a Hugging Face model")
        return
    rows = tensor.unbind() if pair.is_stacked else [tensor]
    for name, row in zip(pair.theirs, rows, strict=True):
        yield name, row if pair.to_theirs is None else pair.to_theirs(row)


def write_folder(
    path: Path,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    files: Mapping[str, bytes],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a new folder: ``tensors`` of theirs as they come, and ``files`` beside them.

    One shard's tensors are in memory at a time. ``ValueError`` if ``path`` exists.
    """
    with new_folder(path) as scratch:
        sizes: list[dict[str, int]] = []
        for shard in _shards(tensors, shard_bytes):
            save_file(shard, scratch / f"{len(sizes)}.part", metadata={"format": "pt"})
            sizes.append({name: tensor.nbytes for name, tensor in shard.items()})
            # Freed before the next shard is made.
            shard.clear()
        # Shards are named only now: their number is part of each name.
        names = [f"model-{i + 1:05d}-of-{len(sizes):05d}.safetensors" for i in range(len(sizes))]
        if len(sizes) == 1:
            names = [WHOLE_FILE]
        else:
            places = {t: name for name, part in zip(names, sizes, strict=True) for t in part}
            total = sum(sum(part.values()) for part in sizes)
            index = {"metadata": {"total_size": total}, "weight_map": places}
            (scratch / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
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
        # In memory of its own: the format does not allow tensors that share it.
        shard[name] = tensor.clone(memory_format=torch.contiguous_format)
        size += tensor.nbytes
    yield shard


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill; afterwards it is at ``path``, as a whole or not at all."""
    if path.exists() or path.is_symlink():
        raise ValueError(f"{path}: it is there already, and nothing is overwritten")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    scratch = path.with_name(f".tmp-{path.name}-{uuid.uuid4().hex[:8]}")
    scratch.mkdir(mode=0o700)
    try:
        yield scratch
        for file in scratch.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        sync_folder(scratch)
        scratch.rename(path)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    sync_folder(path.parent)


def _read_table(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(read_file(path.resolve()))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(table, dict):
        raise ValueError(f"{path}: not a table")
    return table


def _files_of(path: Path) -> dict[str, set[str] | None]:
    """The files of tensors, and the names that each should have; None: whatever is in it."""
    has_whole, has_index = (path / WHOLE_FILE).exists(), (path / INDEX_FILE).exists()
    if has_whole and has_index:
        raise ValueError(f"{path}: both {WHOLE_FILE} and {INDEX_FILE}; one must go")
    if has_whole:
        return {WHOLE_FILE: None}
    if not has_index:
        pickles = sorted(file.name for file in path.glob("*.*") if file.suffix in PICKLES)
        texts = [f"; {name} is a pickle, which could run code: not read" for name in pickles[:1]]
        raise ValueError(f"{path}: no {WHOLE_FILE} nor {INDEX_FILE}{''.join(texts)}")
    weight_map = _read_table(path / INDEX_FILE).get("weight_map")
    files: dict[str, set[str] | None] = {}
    for name, file in weight_map.items() if isinstance(weight_map, dict) else ():
        if not isinstance(file, str) or not FILE_NAME.fullmatch(file):
            raise ValueError(f"{path / INDEX_FILE}: {file!r} is not the name of a file")
        files[file] = (files.get(file) or set()) | {name}
    if not files:
        raise ValueError(f"{path / INDEX_FILE}: no weight_map")
    return files


def _open(path: Path) -> Any:
    try:
        # Raises for a pipe, which would wait for a writer.
        open_file(path.resolve()).close()
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: {error}") from None


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit."""
    is_same_kind = (one.dtype, one.shape) == (other.dtype, other.shape)
    return is_same_kind and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _box(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def _whole(tensor: torch.Tensor) -> TensorStorageMetadata:
    """A tensor as one chunk; planning does not depend on the dtype of its file."""
    chunk = ChunkStorageMetadata(torch.Size([0] * tensor.ndim), tensor.shape)
    return TensorStorageMetadata(TensorProperties(tensor.dtype), tensor.shape, [chunk])
