"""Where text comes from: the documents of each row, in an order that no number of ranks changes.

A global batch has a fixed number of rows. Row ``r`` of ``n`` reads documents r, r + n, r + 2n, ...
of an endless order, so what a step consumes depends on the seed and the step alone.
"""

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np

from config.job_config import Data
from data.text_files import TextFiles, builtin_files, matching_files

TABLE_SUFFIXES = {".jsonl", ".parquet"}
FINGERPRINTED = 64

Document = str | np.ndarray
"""Text, or its ids, markers among them, as they are trained on."""


class Source(Protocol):
    fingerprint: str
    """Equal for sources that give equal documents in equal order."""
    description: str

    def documents(self, row: int, n_rows: int, start: int) -> Iterator[Document]:
        """The row's documents from its ``start``-th on, without end."""
        ...


class Documents(Protocol):
    """What can be read by index, in a natural order."""

    keys: np.ndarray
    """Of each document, the uniform uint64 that decides whether it is held out."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Document: ...


class ShuffledDocuments:
    """Documents that can be read by index, in another seeded order each epoch."""

    def __init__(
        self, documents: Documents, indices: np.ndarray, *, seed: int, name: str, fingerprint: str
    ) -> None:
        if len(indices) == 0:
            raise ValueError(
                f"data: none of {len(documents):,} documents is for {name};"
                " see data.validation_percent"
            )
        self._documents, self._indices, self._seed = documents, indices, seed
        parts = f"{fingerprint}/{name}/{seed}/{len(indices)}"
        self.fingerprint = hashlib.sha256(parts.encode()).hexdigest()
        self.description = f"{len(indices):,} documents for {name}"
        # Rows are in different epochs for a while; two orders serve them all.
        self._order = lru_cache(maxsize=2)(self._permutation)

    def documents(self, row: int, n_rows: int, start: int) -> Iterator[Document]:
        counter = start * n_rows + row
        while True:
            epoch, place = divmod(counter, len(self._indices))
            yield self._documents[self._order(epoch)[place]]
            counter += n_rows

    def _permutation(self, epoch: int) -> np.ndarray:
        # NumPy promises the same raw draws in every release, and no such thing of permutations.
        draws = np.random.Philox(key=[self._seed, epoch]).random_raw(len(self._indices))
        return self._indices[np.argsort(draws, kind="stable")]


def build_sources(
    config: Data, seed: int, *, with_held_out: bool = True
) -> tuple[Source, Source | None]:
    """Training and held-out documents; raise ``ValueError`` that names what is missing.

    Held out is decided by a hash of a file's relative path (and a table's row), so the split is the
    same on every machine. None: nothing is held out, or it is not asked for.
    """
    if config.source in ("c4", "huggingface"):
        # datasets takes a second to import, so only those who need it wait.
        from data.tables import hub_streams

        return hub_streams(config, with_held_out)
    documents, fingerprint = open_documents(config)
    is_held_out = documents.keys < np.uint64(config.validation_percent / 100 * 2**64)
    train = ShuffledDocuments(
        documents, np.flatnonzero(~is_held_out), seed=seed, name="training", fingerprint=fingerprint
    )
    if config.validation_percent == 0 or not with_held_out:
        return train, None
    held_out = ShuffledDocuments(
        documents,
        np.flatnonzero(is_held_out),
        seed=seed,
        name="validation",
        fingerprint=fingerprint,
    )
    return train, held_out


def open_documents(config: Data) -> tuple[Documents, str]:
    """What the files have, by index, and its fingerprint; ``ValueError`` names what is missing."""
    is_builtin = config.source == "builtin"
    files = builtin_files() if is_builtin else matching_files(config.path)
    documents: Documents
    if TABLE_SUFFIXES & {path.suffix for path, _ in files}:
        from data.tables import Tables

        documents = Tables(files, config.text_key)
    else:
        documents = TextFiles(files, encoding_errors="replace" if is_builtin else "strict")
    return documents, _fingerprint(files, documents)


def _fingerprint(files: list[tuple[Path, str]], documents: Documents) -> str:
    """Of the names and sizes of all files, and of a few documents spread over them."""
    listing = "\n".join(f"{name} {path.stat().st_size}" for path, name in files)
    digest = hashlib.sha256(listing.encode())
    for index in range(0, len(documents), len(documents) // FINGERPRINTED + 1):
        document = documents[index]
        digest.update(document.encode() if isinstance(document, str) else document.tobytes())
    return digest.hexdigest()
