"""Several sources as one: each row of the global batch draws documents by shares of tokens.

A row takes its next document from the source that is farthest behind its share, so that on every
row the shares stay within a few documents of the weights. Rows begin at different places of that
cycle, so that a global batch has the shares too. Only the row's own past decides.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from data.sources import Document, Source
from data.tokenizer import Tokenizer

MAX_EMPTY_DOCUMENTS = 100_000
END: Any = object()


class Mixture:
    """Sources, and each one's share of the tokens."""

    def __init__(self, sources: Sequence[Source], weights: Sequence[float] = (1.0,)) -> None:
        assert len(sources) == len(weights), "a weight for each source"
        self.sources, self.weights = tuple(sources), tuple(weights)
        self.description = "; ".join(source.description for source in sources)
        self.fingerprint = sources[0].fingerprint
        """Equal for mixtures that give equal documents in equal order."""
        if len(sources) > 1:
            parts = [f"{s.fingerprint} {w}" for s, w in zip(sources, weights, strict=True)]
            self.fingerprint = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        self._head_starts: dict[tuple[int, int], float] = {}

    def choose(
        self, row: int, taken: Sequence[int], tokens: Sequence[int], live: Sequence[int]
    ) -> int:
        """The next of the ``live`` sources, given the documents and tokens taken from each."""
        if len(live) == 1:
            return live[0]
        # Documents of a source that was not read yet are taken to be as long as any source's.
        means = [n / max(count, 1) for n, count in zip(tokens, taken, strict=True)]
        longest = max(means) or 1.0

        def progress(i: int) -> float:
            ahead = self._head_start(row, i) * (means[i] or longest)
            return (tokens[i] + ahead) / self.weights[i]

        return min(live, key=progress)

    def _head_start(self, row: int, source: int) -> float:
        """In documents. Exponential, so that a source is the first as often as its weight says."""
        key = row, source
        if key not in self._head_starts:
            digest = hashlib.blake2b(b"%d %d" % key, digest_size=7).digest()
            # 53 bits are all that a float has.
            uniform = (int.from_bytes(digest, "little") >> 3) / 2**53
            self._head_starts[key] = -math.log1p(-uniform)
        return self._head_starts[key]


class RowState(NamedTuple):
    """Where a row is: counts for each source, and a place in the next document."""

    taken: tuple[int, ...]
    """Documents of each source before the next one."""
    tokens: tuple[int, ...]
    """Their tokens."""
    bad: int
    """How many of them all could not be read."""
    source: int
    """The next document's."""
    token: int
    """Where to begin in that document; with best_fit, which sequence of those packed from it on."""

    @property
    def document(self) -> int:
        """The next document's number, counted over all sources."""
        return sum(self.taken)

    @property
    def place(self) -> tuple[int, int]:
        return self.document, self.token

    def as_json(self) -> dict[str, Any]:
        return self._asdict() | {"taken": list(self.taken), "tokens": list(self.tokens)}

    @classmethod
    def of_json(cls, saved: dict[str, Any]) -> "RowState":
        return cls(**saved | {name: tuple(saved[name]) for name in ("taken", "tokens")})


class MixedRow:
    """The documents of one row, tokenized."""

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
        self.row = row
        self._mixture, self._tokenizer, self._vocab_size = mixture, tokenizer, vocab_size
        self._taken, self._tokens, self._bad = list(state.taken), list(state.tokens), state.bad
        self._streams: list[Iterator[Document]] = [
            source.documents(row, n_rows, taken)
            for source, taken in zip(mixture.sources, state.taken, strict=True)
        ]
        self._live = list(range(len(self._streams)))

    def read(self) -> tuple[RowState, np.ndarray] | None:
        """The next document that has tokens, and the state before it; None if all have ended."""
        n_empty = 0
        while self._live:
            chosen = self._mixture.choose(self.row, self._taken, self._tokens, self._live)
            before = self.state._replace(source=chosen)
            document = next(self._streams[chosen], END)
            if document is END:
                self._live.remove(chosen)
                continue
            self._taken[chosen] += 1
            self._bad += document is None
            if document is not None and len(document) > 0:
                if isinstance(document, str):
                    document = self._tokenizer.encode_document(document)
                self._check_ids(document, before)
                self._tokens[chosen] += len(document)
                return before, document
            n_empty += 1
            if n_empty == MAX_EMPTY_DOCUMENTS:
                text = f"{MAX_EMPTY_DOCUMENTS:,} documents in a row have no text"
                raise ValueError(f"data: {self._mixture.description}: {text}")
        return None

    @property
    def state(self) -> RowState:
        """The state after everything that was read."""
        return RowState(tuple(self._taken), tuple(self._tokens), self._bad, source=0, token=0)

    def _check_ids(self, ids: np.ndarray, before: RowState) -> None:
        """Raise ``ValueError`` for a foreign id: a sharded embedding would make zeros of it."""
        # Seen as unsigned, a negative id is a large one.
        is_signed = ids.dtype.kind == "i"
        if (ids.view(f"u{ids.itemsize}") if is_signed else ids).max() < self._vocab_size:
            return
        bad = ids[(ids < 0) | (ids >= self._vocab_size)][0]
        source = self._mixture.sources[before.source].description
        raise ValueError(
            f"data: {source}: document {before.taken[before.source]} of row {self.row} has the id"
            f" {bad}; model.vocab_size is {self._vocab_size}"
        )
