"""Several sources as one: each row of the global batch draws documents by weights of tokens.

A row takes its next document from the source that is farthest behind its share, so the shares are
true to the weights within a document, on every row, and depend on nothing but the row's own past.
"""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from data.sources import Document, Source
from data.tokenizer import Tokenizer

MAX_EMPTY_DOCUMENTS = 100_000
GOLDEN = 0.6180339887498949
END: Any = object()


class Mixture:
    """Sources and the shares of tokens that they have."""

    def __init__(self, sources: Sequence[Source], weights: Sequence[float] = (1.0,)) -> None:
        assert len(sources) == len(weights), "a weight for each source"
        self.sources, self.weights = tuple(sources), tuple(weights)
        self.description = "; ".join(source.description for source in sources)
        self.fingerprint = sources[0].fingerprint
        if len(sources) > 1:
            parts = [f"{s.fingerprint} {w}" for s, w in zip(sources, weights, strict=True)]
            self.fingerprint = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        """Equal for mixtures that give equal documents in equal order."""

    def choose(self, row: int, tokens: Sequence[int], live: Sequence[int]) -> int:
        """Of the ``live`` sources the next, after so many ``tokens`` of each."""
        if len(live) == 1:
            return live[0]
        if any(tokens):
            return min(live, key=lambda i: (tokens[i] / self.weights[i], i))
        # At the start all shares are met: rows begin with different sources, spread by weight.
        ends = list(itertools.accumulate(self.weights[i] for i in live))
        point = (row + 1) * GOLDEN % 1.0 * ends[-1]
        return next(i for i, end in zip(live, ends, strict=True) if point < end)


class RowState(NamedTuple):
    """Where a row is: integers for each source, and a token of the document that comes next."""

    taken: tuple[int, ...]
    """Documents of each source before this one."""
    tokens: tuple[int, ...]
    """And their tokens."""
    bad: int
    """And how many of all could not be read."""
    source: int
    """That this document is of."""
    token: int
    """With best_fit, a sequence of the documents that are packed together from this one on."""

    @property
    def document(self) -> int:
        """Its number, counted over all sources."""
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
        """The next document that has tokens, and the state before it; None at the end of all."""
        n_empty = 0
        while self._live:
            chosen = self._mixture.choose(self.row, self._tokens, self._live)
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
                raise ValueError(f"data: {MAX_EMPTY_DOCUMENTS:,} documents in a row have no text")
        return None

    @property
    def state(self) -> RowState:
        """After all that was read."""
        return RowState(tuple(self._taken), tuple(self._tokens), self._bad, source=0, token=0)

    def _check_ids(self, ids: np.ndarray, before: RowState) -> None:
        """No other guard is certain: an embedding that is split takes a foreign id for zeros."""
        # A negative one is a large one without its sign.
        is_signed = ids.dtype.kind == "i"
        if (ids.view(f"u{ids.itemsize}") if is_signed else ids).max() < self._vocab_size:
            return
        bad = ids[(ids < 0) | (ids >= self._vocab_size)][0]
        raise ValueError(
            f"data: {self._mixture.description}: document {before.document} of row {self.row} has"
            f" the id {bad}; model.vocab_size is {self._vocab_size}"
        )
