"""Where text comes from: each row's documents, in the same order on any number of ranks.

A global batch has a fixed number of rows. Row ``r`` of ``n`` reads documents r, r + n, r + 2n, ...
of an endless order, so what a step consumes depends on the seed and the step alone.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Protocol

import numpy as np

from config.job_config import Data, DataSource
from data.files import FINGERPRINTED, spread
from data.text_files import TextFiles, builtin_files, matching_files
from data.token_files import TokenFiles, open_token_files
from data.tokenizer import Tokenizer
from runtime.log import logger

TABLE_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")

Document = str | np.ndarray | None
"""Text, or its ids as they are trained on, markers included. None: it cannot be read."""


class Source(Protocol):
    fingerprint: str
    """Equal for sources that give equal documents in equal order."""
    description: str

    def documents(self, row: int, n_rows: int, start: int) -> Iterator[Document]:
        """The row's documents from its ``start``-th on; without end, if the source repeats."""
        ...

    @property
    def n_documents(self) -> int | None:
        """Documents in one epoch, over all rows; None: not known."""
        ...


class Documents(Protocol):
    """Documents that can be read by index, in their natural order."""

    @property
    def keys(self) -> np.ndarray:
        """For each document, the uniform uint64 that decides whether it is held out."""
        ...

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Document: ...


class Lenient:
    """Documents, with None for each that cannot be read."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents

    @property
    def keys(self) -> np.ndarray:
        return self._documents.keys

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> Document:
        try:
            return self._documents[index]
        except ValueError as error:
            logger.warning("skipped: %s", error)
            return None


class ShuffledDocuments:
    """Documents that can be read by index, in another seeded order each epoch."""

    def __init__(
        self,
        documents: Documents,
        indices: np.ndarray,
        *,
        seed: int,
        name: str,
        fingerprint: str,
        repeat: bool = True,
    ) -> None:
        if len(documents) == 0:
            raise ValueError("data.path: there is no document")
        if len(indices) == 0:
            raise ValueError(
                f"data: none of {len(documents):,} documents is for {name};"
                " see data.validation_percent"
            )
        self._documents, self._indices, self._seed = documents, indices, seed
        self._repeat, self.n_documents = repeat, len(indices)
        parts = f"{fingerprint}/{name}/{seed}/{len(indices)}" + ("" if repeat else "/once")
        self.fingerprint = hashlib.sha256(parts.encode()).hexdigest()
        self.description = f"{len(indices):,} documents for {name}"
        # Rows may be in two epochs at a time, so two orders serve them all.
        self._order = lru_cache(maxsize=2)(self._permutation)

    def documents(self, row: int, n_rows: int, start: int) -> Iterator[Document]:
        counter = start * n_rows + row
        while self._repeat or counter < len(self._indices):
            epoch, place = divmod(counter, len(self._indices))
            yield self._documents[self._order(epoch)[place]]
            counter += n_rows

    def _permutation(self, epoch: int) -> np.ndarray:
        # NumPy promises the same raw draws in every release, but not the same permutations.
        draws = np.random.Philox(key=[self._seed, epoch]).random_raw(len(self._indices))
        return self._indices[np.argsort(draws, kind="stable")]


def build_sources(
    config: Data, seed: int, *, with_held_out: bool = True, tokenizer: Tokenizer | None = None
) -> tuple[list[Source], dict[str, Source]]:
    """Each source's training documents, and held-out ones by the source's label.

    If ``tokenizer`` is given, it must be that of sources that are tokenized already. A hash of a
    file's relative path (and a table's row) decides what is held out, so the split is the same on
    every machine. Raises ``ValueError`` that names what is missing.
    """
    train, held_out = [], {}
    percent, skips_bad = config.validation_percent, config.on_bad_record == "skip"
    for source in config.mixture:
        with naming(source, config):
            if source.type == "tokens" and tokenizer is not None:
                check_tokenizer(open_token_files(source.path), tokenizer, config.tokenizer)
            one, other = _build_source(
                source, percent, seed, with_held_out=with_held_out, skips_bad=skips_bad
            )
        train.append(one)
        if other is not None:
            held_out[source.label] = other
    return train, held_out


def check_tokenizer(files: TokenFiles, tokenizer: Tokenizer, name: str) -> None:
    """Raise ``ValueError`` unless ``files`` have ids of ``tokenizer``, as far as they tell."""
    theirs = files.tokenizer_fingerprint
    if theirs is not None and theirs != tokenizer.fingerprint:
        raise ValueError(f"data.path: the ids are not those of data.tokenizer, {name}")
    if files.max_id is not None and files.max_id >= tokenizer.n_vocab:
        text = f"an id is {files.max_id}; data.tokenizer, {name}, has {tokenizer.n_vocab}"
        raise ValueError(f"data.path: {text}")


@contextmanager
def naming(source: DataSource, config: Data) -> Iterator[None]:
    """Have an error say which of several sources it is about."""
    try:
        yield
    except (ValueError, OSError) as error:
        if not config.sources:
            raise
        kind = ValueError if isinstance(error, ValueError) else OSError
        text = f"data.sources, {source.label}: {str(error).removeprefix('data.')}"
        raise kind(text) from None


def _build_source(
    config: DataSource, percent: float, seed: int, *, with_held_out: bool, skips_bad: bool
) -> tuple[Source, Source | None]:
    if config.type in ("c4", "huggingface"):
        # datasets takes a second to import, so only those who need it wait.
        from data.tables import hub_streams

        return hub_streams(config, with_held_out, skips_bad=skips_bad)
    documents, fingerprint = open_documents(config, skips_bad=skips_bad)
    keys = documents.keys
    is_held_out = keys < np.uint64(percent / 100 * 2**64)
    if percent > 0 and len(keys) > 1 and not is_held_out.any():
        # However few the documents, at least one is held out.
        is_held_out = keys == keys.min()
    build = partial(ShuffledDocuments, documents, seed=seed, fingerprint=fingerprint)
    train = build(np.flatnonzero(~is_held_out), name="training", repeat=config.repeat)
    if percent == 0 or not with_held_out:
        return train, None
    return train, build(np.flatnonzero(is_held_out), name="validation")


def open_documents(config: DataSource, *, skips_bad: bool = False) -> tuple[Documents, str]:
    """A source's documents, by index, and a fingerprint; ``ValueError`` names what is missing.

    ``skips_bad``: those that cannot be read are None.
    """
    if config.type == "tokens":
        tokenized = open_token_files(config.path)
        return Lenient(tokenized) if skips_bad else tokenized, tokenized.fingerprint
    if config.type in ("c4", "huggingface"):
        from data.tables import HubTable

        table = HubTable(config, skips_bad=skips_bad)
        return Lenient(table) if skips_bad else table, _fingerprint(table.name, table)
    is_builtin = config.type == "builtin"
    files = builtin_files() if is_builtin else matching_files(config.path)
    documents: Documents
    if any(path.name.endswith(TABLE_SUFFIXES) for path, _ in files):
        from data.tables import Tables

        documents = Tables(files, config.text_key, skips_bad=skips_bad)
    else:
        documents = TextFiles(files, encoding_errors="replace" if is_builtin else "strict")
    if skips_bad:
        documents = Lenient(documents)
    listing = "\n".join(f"{name} {path.stat().st_size}" for path, name in files)
    return documents, _fingerprint(listing, documents)


def _fingerprint(listing: str, documents: Documents) -> str:
    """Hash of ``listing``, which says what is read, and of a few documents spread over it."""
    digest = hashlib.sha256(listing.encode())
    for index in spread(len(documents), FINGERPRINTED):
        document = documents[index]
        if isinstance(document, np.ndarray):
            digest.update(document.tobytes())
        elif document is not None:
            digest.update(document.encode())
    return digest.hexdigest()
