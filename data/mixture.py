"""Mixture of sources: each row of the global batch samples documents by weights of tokens.

A row takes its next document from the source that is farthest behind its weight, so every row stays
within a few documents of the weights. Rows start at different points of that cycle, so a global
batch of many rows has about these proportions too. The choice depends only on the row itself.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from data.sources import Document, Source
from data.tokenizer import Tokenizer
from runtime.log import logger

MAX_EMPTY_DOCUMENTS = 100_000
END_OF_SOURCE: Any = object()


class Mixture:
    """Sources, and the weight of each in tokens."""

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[float] = (1.0,),
        *,
        skips_bad: bool = False,
    ) -> None:
        """``skips_bad``: skip and count documents that cannot be encoded."""
        assert len(sources) == len(weights), "a weight for each source"
        self.sources, self.weights, self.skips_bad = tuple(sources), tuple(weights), skips_bad
        self.description = "; ".join(source.description for source in sources)
        self.fingerprint = sources[0].fingerprint
        """Equal for mixtures with the same documents in the same order."""
        # Several go on as they are: one that ended would be read alone until it catches up.
        others = sources[0].resumable_fingerprints if len(sources) == 1 else frozenset[str]()
        self.resumable_fingerprints = others
        """Other fingerprints that a checkpoint may have."""
        if len(sources) > 1:
            parts = [f"{s.fingerprint} {w}" for s, w in zip(sources, weights, strict=True)]
            self.fingerprint = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        self._head_starts: dict[tuple[int, int], float] = {}

    def choose(
        self,
        row: int,
        taken: Sequence[int],
        tokens: Sequence[int],
        live: Sequence[int],
        first_tokens: Mapping[int, int],
    ) -> int:
        """Choose the next of the ``live`` sources, given the documents and tokens taken of each.

        ``first_tokens``: of the first document of sources that the row has not read yet, if known.
        """
        if len(live) == 1:
            return live[0]
        # A source that was not read yet is assumed to have the longest documents of all.
        means = [n / max(count, 1) for n, count in zip(tokens, taken, strict=True)]
        longest = max(means) or 1.0

        def progress(i: int) -> float:
            length = means[i] or max(longest, first_tokens.get(i, 0))
            return (tokens[i] + self._head_start(row, i) * length) / self.weights[i]

        return min(live, key=progress)

    def _head_start(self, row: int, source: int) -> float:
        """Exponential, in documents, so that P(source is first) is proportional to its weight."""
        key = row, source
        if key not in self._head_starts:
            digest = hashlib.blake2b(b"%d %d" % key, digest_size=7).digest()
            # A float64 has 53 significant bits.
            uniform = (int.from_bytes(digest, "little") >> 3) / 2**53
            self._head_starts[key] = -math.log1p(-uniform)
        return self._head_starts[key]


class RowState(NamedTuple):
    """Position of a row: counts for each source, and an offset in the next document."""

    taken: tuple[int, ...]
    """Number of documents of each source before the next one."""
    tokens: tuple[int, ...]
    """Their tokens."""
    bad: int
    """Number of those documents, over all sources, that could not be read."""
    source: int
    """Source of the next document."""
    token: int
    """Offset of the next sequence: in tokens of that document; with best_fit, in sequences of the
    window."""

    @property
    def document(self) -> int:
        """Number of documents before the next one, over all sources."""
        return sum(self.taken)

    @property
    def position(self) -> tuple[int, int]:
        """(document, token), as the ledger writes it."""
        return self.document, self.token

    def as_json(self) -> dict[str, Any]:
        return self._asdict() | {"taken": list(self.taken), "tokens": list(self.tokens)}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "RowState":
        return cls(**saved | {name: tuple(saved[name]) for name in ("taken", "tokens")})


class RowStream:
    """Tokenized documents of one row."""

    def __init__(
        self,
        mixture: Mixture,
        tokenizer: Tokenizer,
        row: int,
        state: RowState,
        *,
        n_rows: int,
        vocab_size: int,
    ) -> None:
        self.row, self._n_rows = row, n_rows
        self._mixture, self._tokenizer, self._vocab_size = mixture, tokenizer, vocab_size
        self._taken, self._tokens, self._bad = list(state.taken), list(state.tokens), state.bad
        self._streams: list[Iterator[Document]] = [
            source.documents(row, n_rows, taken)
            for source, taken in zip(mixture.sources, state.taken, strict=True)
        ]
        self._live = list(range(len(self._streams)))
        self._first_tokens: dict[int, int] = {}

    def read(self) -> tuple[RowState, np.ndarray] | None:
        """Return the state before the next nonempty document and its ids (s,); None at the end."""
        n_empty = 0
        while self._live:
            chosen = self._choose()
            before = self.state._replace(source=chosen)
            document = next(self._streams[chosen], END_OF_SOURCE)
            if document is END_OF_SOURCE:
                self._live.remove(chosen)
                continue
            self._taken[chosen] += 1
            ids = self._encode(document, before) if isinstance(document, str) else document
            self._bad += ids is None
            if ids is not None and len(ids) > 0:
                self._check_ids(ids, before)
                self._tokens[chosen] += len(ids)
                return before, ids
            n_empty += 1
            if n_empty == MAX_EMPTY_DOCUMENTS:
                text = f"{MAX_EMPTY_DOCUMENTS:,} consecutive documents have no text"
                raise ValueError(f"data: {self._mixture.description}: {text}")
        return None

    @property
    def state(self) -> RowState:
        """State after all documents read so far."""
        return RowState(tuple(self._taken), tuple(self._tokens), self._bad, source=0, token=0)

    def _choose(self) -> int:
        """Choose the source of the next document.

        Before another source is read for the first time, the length of its document is looked at.
        Otherwise all rows would soon read a source of long documents, and then none for long.
        """
        while True:
            chosen = self._mixture.choose(
                self.row, self._taken, self._tokens, self._live, self._first_tokens
            )
            is_first = not any(self._taken)
            if is_first or self._taken[chosen] or chosen in self._first_tokens:
                return chosen
            self._first_tokens[chosen] = self._next_tokens(chosen)

    def _next_tokens(self, source: int) -> int:
        """Length of the next document of ``source`` in tokens; 0 if none is left or it is bad."""
        document = next(self._streams[source], END_OF_SOURCE)
        if document is END_OF_SOURCE:
            return 0
        self._streams[source] = chain([document], self._streams[source])
        if not isinstance(document, str):
            # None is a bad record.
            return 0 if document is None else len(document)
        try:
            return len(self._tokenizer.encode_document(document)) if document else 0
        except ValueError:
            return 0

    def _encode(self, text: str, before: RowState) -> np.ndarray | None:
        try:
            return self._tokenizer.encode_document(text) if text else np.empty(0, np.int64)
        except ValueError as error:
            where = f"data: {self._where(before)} {error}"
            if not self._mixture.skips_bad:
                raise ValueError(where) from None
            logger.warning("data: skipped bad record: %s", where)
            return None

    def _where(self, before: RowState) -> str:
        source, number = self._mixture.sources[before.source], before.taken[before.source]
        place = source.place(self.row, self._n_rows, number)
        place = f" ({place})" if place else ""
        return f"{source.description}: document {number} of row {self.row}{place}"

    def _check_ids(self, ids: np.ndarray, before: RowState) -> None:
        """Raise ``ValueError`` for ids out of range: a sharded embedding would return zeros."""
        # Viewed as unsigned, a negative id is large.
        is_signed = ids.dtype.kind == "i"
        if (ids.view(f"u{ids.itemsize}") if is_signed else ids).max() < self._vocab_size:
            return
        bad = ids[(ids < 0) | (ids >= self._vocab_size)][0]
        raise ValueError(
            f"data: {self._where(before)} has the id {bad}; model.vocab_size is {self._vocab_size}"
        )
