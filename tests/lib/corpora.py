"""Documents, sources of them, and files of token ids as tools.prepare writes them."""

import hashlib
import random
import struct
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from config.job_config import Data
from data.sources import ShuffledDocuments, Source, build_sources
from data.token_files import encode_index

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
DOCUMENTS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_prepared(
    folder: Path,
    shards: list[list[list[int]]],
    dtype: str = "uint16",
    fingerprint: str = "f",
    **markers: str | None,
) -> Path:
    """``markers``: data.bos and data.eos with which the documents were tokenized."""
    folder.mkdir(parents=True)
    entries = []
    for number, documents in enumerate(shards):
        path = folder / f"shard-{number:05d}.bin"
        ids = [token for document in documents for token in document]
        path.write_bytes(np.array(ids, np.dtype(dtype).newbyteorder("<")).tobytes())
        ends = np.cumsum([len(document) for document in documents], dtype="<i8")
        path.with_suffix(".ends").write_bytes(ends.tobytes())
        hashes = {"sha256": _digest(path), "ends_sha256": _digest(path.with_suffix(".ends"))}
        limits = {"min_id": min(ids, default=None), "max_id": max(ids, default=None)}
        counts = {"documents": len(documents), "tokens": len(ids), "skipped": 0}
        entries.append({"file": path.name, **counts, **limits, **hashes})
    tokenizer = {"name": "bytes", "fingerprint": fingerprint, **markers}
    write_index(folder, {"format": 1, "dtype": dtype, "tokenizer": tokenizer, "shards": entries})
    return folder


def write_megatron(path: Path, documents: list[list[list[int]]], dtype: str = "int32") -> Path:
    """Write documents of sequences in the layout of Megatron-LM's ``IndexedDatasetBuilder``."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    item = np.dtype(dtype).itemsize
    firsts = np.cumsum([0, *(len(document) for document in documents)])
    path.parent.mkdir(exist_ok=True)
    with path.with_suffix(".bin").open("wb") as file:
        for sequence in sequences:
            file.write(np.array(sequence, dtype).tobytes())
    with path.open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, CODES[dtype]))
        file.write(struct.pack("<QQ", len(sequences), len(firsts)))
        file.write(np.array(lengths, "<i4").tobytes())
        file.write(
            np.array([item * sum(lengths[:i]) for i in range(len(lengths))], "<i8").tobytes()
        )
        file.write(firsts.astype("<i8").tobytes())
    return path


def write_index(folder: Path, index: dict[str, Any]) -> None:
    (folder / "index.json").write_bytes(encode_index(index))


def source(texts: list[str], *, repeat: bool = True) -> ShuffledDocuments:
    return ShuffledDocuments(
        texts, np.arange(len(texts)), seed=3, name="training", fingerprint=str(texts), repeat=repeat
    )


def corpora(generator: random.Random, n_sources: int, n_documents: int) -> list[list[str]]:
    """Texts without common tokens; some are empty, some have one token, some are long."""
    ids, found = count(2), []
    for _ in range(n_sources):
        longest = generator.choice([2, 20, 90])
        lengths = [
            generator.choice([0, 1, generator.randint(1, longest)]) for _ in range(n_documents)
        ]
        lengths[0] = 5
        found.append([" ".join(str(next(ids)) for _ in range(length)) for length in lengths])
    return found


def both(config: Data, seed: int) -> list[Source]:
    """Build the only source, for training and held out."""
    (train,), held_out = build_sources(config, seed)
    return [train, *held_out.values()]
