"""Kinds of input: how each is written, read by the product, and read plainly in a few lines."""

import base64
import bz2
import csv
import gzip
import io
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import safetensors.torch
import tiktoken
import tokenizers
import tomli
import torch
import zstandard

from checkpoint.hugging_face import Folder, open_checked, split, write_folder
from config import load_config
from config.job_config import DataSource
from data.sources import open_documents
from data.token_files import verify
from data.tokenizer import load_tokenizer
from models import find_spec
from models.meta import build_on_meta
from tests.lib.corpora import write_megatron, write_prepared
from tests.lib.formats import TEXTS, array, arrow, lines, parquet, table
from tests.lib.layouts import small_args
from tests.lib.repository import ROOT
from tools import train_tokenizer

DOCUMENTS = [[256, *range(number, number + 9), 257] for number in range(40)]
LONG = [f"{text} {number}" for number in range(20) for text in TEXTS]
ARGS = small_args("llama3", "debugmodel")


@dataclass(frozen=True)
class Kind:
    """A kind of input: how it is written, read by the product, and read plainly."""

    write: Callable[[Path], object]
    read: Callable[[Path], Any]
    plain: Callable[[Path], Any] | None = None
    """None: nothing but the intact contents is accepted."""
    depends: bool = False
    """Its files depend on each other, so an error may name any of them."""


# Documents


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)


def documents(pattern: str, type: str, folder: Path) -> list[Any]:
    found, _ = open_documents(DataSource(type=type, path=f"{folder}/{pattern}"))
    read = [found[i] for i in range(len(found))]
    return [item.tolist() if isinstance(item, np.ndarray) else item for item in read]


def plain_texts(folder: Path) -> list[str]:
    return [text for path in regular(folder) if (text := path.read_bytes().decode("utf-8-sig"))]


def regular(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.iterdir()) if path.is_file())


def plain_rows(parse: Callable[[bytes], list[Any]], folder: Path) -> list[str]:
    texts = [row["text"] for path in regular(folder) for row in parse(unpacked(path))]
    "".join(texts).encode()
    return texts


def unpacked(path: Path) -> bytes:
    content = path.read_bytes()
    if content.startswith(b"\x28\xb5\x2f\xfd"):
        return zstandard.ZstdDecompressor().stream_reader(io.BytesIO(content)).read()
    for magic, unpack in ((b"\x1f\x8b", gzip.decompress), (b"BZh", bz2.decompress)):
        if content.startswith(magic):
            return unpack(content)
    return content


def json_rows(content: bytes) -> list[Any]:
    text, rows, place = content.decode("utf-8-sig").strip(), list[Any](), 0
    while place < len(text):
        value, end = json.JSONDecoder().raw_decode(text, place)
        rows += value if isinstance(value, list) else [value]
        place = end + len(text[end:]) - len(text[end:].lstrip())
    return rows


def csv_rows(content: bytes) -> list[Any]:
    return list(csv.DictReader(io.StringIO(content.decode("utf-8-sig"), newline=""), strict=True))


def parquet_rows(content: bytes) -> list[Any]:
    return pq.read_table(io.BytesIO(content)).to_pylist() if content else []


def arrow_rows(content: bytes) -> list[Any]:
    is_file = content.startswith(b"ARROW1")
    read = ipc.open_file if is_file else ipc.open_stream
    return read(io.BytesIO(content)).read_all().to_pylist() if content else []


def documents_of(suffix: str, content: Callable[[list[str]], bytes], parse: Any) -> Kind:
    files = {f"{i}{suffix}": content(LONG[i::3]) for i in range(3)}
    read, plain = partial(documents, "*", "files"), partial(plain_rows, parse)
    return Kind(partial(write_files, files=files), read, plain)


# Token ids


def plain_prepared(folder: Path) -> list[list[int]]:
    index = json.loads((folder / "index.json").read_bytes())
    found = []
    for shard in index["shards"]:
        path = folder / shard["file"]
        ids = np.fromfile(path, index["dtype"])
        ends = np.fromfile(path.with_suffix(".ends"), "<i8")
        found += pieces(ids, [0, *ends[:-1]], ends)
    return found


def plain_megatron(folder: Path) -> list[list[int]]:
    raw, ids = (folder / "m.idx").read_bytes(), np.fromfile(folder / "m.bin", "<i4")
    n_sequences, n_indices = struct.unpack_from("<QQ", raw, 18)
    lengths, pointers, indices = (
        np.frombuffer(raw, dtype, count, offset)
        for dtype, count, offset in (
            ("<i4", n_sequences, 34),
            ("<i8", n_sequences, 34 + 4 * n_sequences),
            ("<i8", n_indices, 34 + 12 * n_sequences),
        )
    )
    sequences = pieces(ids, pointers // 4, pointers // 4 + lengths)
    return [list(chain(*sequences[first:last])) for first, last in pairwise(indices)]


def pieces(ids: np.ndarray, starts: Any, ends: Any) -> list[list[int]]:
    assert all(0 <= s <= e <= len(ids) for s, e in zip(starts, ends, strict=True))
    return [ids[s:e].tolist() for s, e in zip(starts, ends, strict=True)]


def verified(folder: Path) -> list[str]:
    if problems := [f"{path}: {text}" for path, text in verify(folder) if text]:
        raise ValueError("; ".join(problems))
    return []


# Tokenizers


@cache
def trained_tokenizer(folder: Path) -> dict[str, bytes]:
    """Files of a small tokenizer, as tools.train_tokenizer writes them."""
    (folder / "text.txt").write_text("".join(LONG))
    assert train_tokenizer.main([
        str(folder / "trained"), "--vocab_size", "290",
        "--data.source", "files", "--data.path", str(folder / "text.txt"),
        "--data.validation_percent", "0",
    ]) == 0  # fmt: skip
    return {path.name: path.read_bytes() for path in (folder / "trained").iterdir()}


def write_tokenizer(names: tuple[str, ...], folder: Path) -> None:
    made = folder.parents[1] / "tokenizer"
    made.mkdir(exist_ok=True)
    files = trained_tokenizer(made)
    config = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    files = files | {"tokenizer_config.json": json.dumps(config | {"add_bos_token": True}).encode()}
    write_files(folder, {name: files[name] for name in names})


def encoded(name: str, folder: Path) -> Any:
    tokenizer = load_tokenizer(str(folder / name))
    assert tokenizer.eos_id < tokenizer.n_vocab
    return [tokenizer.encode(text).tolist() for text in LONG]


def plain_tokenizer_json(folder: Path) -> Any:
    tokenizer = tokenizers.Tokenizer.from_str((folder / "tokenizer.json").read_text())
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in LONG]


def plain_tiktoken(folder: Path) -> Any:
    lines = (folder / "tokenizer.tiktoken").read_text().splitlines()
    ranks = {base64.b64decode(a): int(b) for a, b in (line.split() for line in lines)}
    companion = json.loads((folder / "tokenizer.tiktoken.json").read_text())
    encoding = tiktoken.Encoding(
        "plain", pat_str=companion["pattern"], mergeable_ranks=ranks, special_tokens={}
    )
    return [encoding.encode_ordinary(text) for text in LONG]


# Weights and configurations


def write_weights(folder: Path, *, shard_bytes: int) -> None:
    spec, tensors = find_spec("llama3"), []
    assert spec.hugging_face is not None
    state = build_on_meta(spec, ARGS, torch.float32).state_dict()
    for pair in spec.hugging_face.tensors(ARGS):
        tensor = torch.full(state[pair.fqn].shape, 0.01)
        tensors += [(name, t.contiguous()) for name, t in split(pair, tensor)]
    folder.rmdir()
    write_folder(folder, spec.hugging_face.config(ARGS), tensors, files={}, shard_bytes=shard_bytes)


def weights(folder: Path) -> Any:
    spec = find_spec("llama3")
    assert spec.hugging_face is not None
    state = build_on_meta(spec, ARGS, torch.float32).state_dict()
    shapes = {fqn: tensor.shape for fqn, tensor in state.items()}
    opened: Folder = open_checked(folder, spec.hugging_face, ARGS, shapes)
    return {name: sha(opened.read(name)) for name in opened.names}


def plain_weights(folder: Path) -> Any:
    json.loads((folder / "config.json").read_bytes())
    files = [path for path in regular(folder) if path.suffix == ".safetensors"]
    loaded = [safetensors.torch.load(path.read_bytes()) for path in files]
    return {name: sha(tensor) for part in loaded for name, tensor in part.items()}


def sha(tensor: torch.Tensor) -> int:
    return hash((str(tensor.dtype), tuple(tensor.shape), tensor.numpy().tobytes()))


def configured(folder: Path) -> Any:
    dump = load_config(folder / "run.toml", []).model_dump()
    return {key: dump[section][key] for section, key in keys_of(folder)}


def plain_config(folder: Path) -> Any:
    found = tomli.loads((folder / "run.toml").read_bytes().decode())
    return {key: found[section][key] for section, key in keys_of(folder)}


def keys_of(folder: Path) -> list[tuple[str, str]]:
    found = tomli.loads((folder / "run.toml").read_bytes().decode())
    return [(section, key) for section, keys in found.items() for key in keys]


CONFIG = (ROOT / "train_configs" / "debug_model.toml").read_bytes()
JSON = ("tokenizer.json", "tokenizer_config.json")
TIKTOKEN = ("tokenizer.tiktoken", "tokenizer.tiktoken.json")
TEXT_FILES = {f"{i}.txt": text.encode() * 200 for i, text in enumerate(TEXTS)}
PREPARED = partial(write_prepared, shards=[DOCUMENTS[:20], DOCUMENTS[20:]])
KINDS = {
    "text": Kind(
        partial(write_files, files=TEXT_FILES), partial(documents, "*", "text"), plain_texts
    ),
    "jsonl": documents_of(".jsonl", lines, json_rows),
    "json": documents_of(".json", array, json_rows),
    "csv": documents_of(".csv", table, csv_rows),
    "parquet": documents_of(".parquet", parquet, parquet_rows),
    "arrow": documents_of(".arrow", partial(arrow, is_stream=False), arrow_rows),
    "arrow stream": documents_of(".arrow", partial(arrow, is_stream=True), arrow_rows),
    "gz": documents_of(".jsonl.gz", lambda texts: gzip.compress(lines(texts)), json_rows),
    "zst": documents_of(".csv.zst", lambda texts: zstandard.compress(table(texts)), csv_rows),
    "prepared": Kind(
        lambda folder: (folder.rmdir(), PREPARED(folder)),
        partial(documents, "", "tokens"),
        plain_prepared,
        depends=True,
    ),
    "verified": Kind(lambda folder: (folder.rmdir(), PREPARED(folder)), verified, depends=True),
    "megatron": Kind(
        lambda folder: write_megatron(folder / "m.idx", [[d, d[:5]] for d in DOCUMENTS]),
        partial(documents, "m.idx", "tokens"),
        plain_megatron,
        depends=True,
    ),
    "tokenizer.json": Kind(
        partial(write_tokenizer, JSON), partial(encoded, ""), plain_tokenizer_json, depends=True
    ),
    "tiktoken": Kind(
        partial(write_tokenizer, TIKTOKEN),
        partial(encoded, "tokenizer.tiktoken"),
        plain_tiktoken,
        depends=True,
    ),
    "safetensors": Kind(
        partial(write_weights, shard_bytes=1 << 30), weights, plain_weights, depends=True
    ),
    "sharded safetensors": Kind(
        partial(write_weights, shard_bytes=1 << 20), weights, plain_weights, depends=True
    ),
    "configuration": Kind(
        lambda folder: write_files(folder, {"run.toml": CONFIG}), configured, plain_config
    ),
}
