"""Sequence packing: concatenate and split documents, or keep them whole by best fit."""

import bisect
from typing import NamedTuple, Protocol

import numpy as np

from data.mixture import RowState, RowStream
from runtime.labels import IGNORE_INDEX

# Sequences that best_fit packs at once. Larger windows pad less, but resume more slowly.
WINDOW_SEQUENCES = 64


class RowSpan(NamedTuple):
    """Span of a row that one sequence holds: from its first token to the next sequence's first."""

    row: int
    start: RowState
    end: RowState


class PackedSequence(NamedTuple):
    """Output arrays of a packer, (s,) int64."""

    tokens: np.ndarray
    labels: np.ndarray
    """The next token at each position, or IGNORE_INDEX."""
    document_ids: np.ndarray | None
    """Document of each token, unique within the sequence; None without a document mask."""
    positions: np.ndarray | None
    """Position of each token, from 0 at its document's first token in the sequence."""

    def mark(self, begin: int, end: int, document_id: int) -> None:
        """Assign the tokens from ``begin`` to ``end`` to one document."""
        if self.document_ids is not None and self.positions is not None:
            self.document_ids[begin:end] = document_id
            self.positions[begin:end] = np.arange(end - begin)

    def pad(self, filled: int, document_id: int, padding_id: int) -> None:
        """Fill the rest with a document without labels: the sequence's own tokens again.

        Equal tokens, as in a sequence without any, would all go to the same experts.
        """
        n_free = len(self.tokens) - filled
        self.tokens[filled:] = np.resize(self.tokens[:filled], n_free) if filled else padding_id
        self.labels[filled:] = IGNORE_INDEX
        self.mark(filled, len(self.tokens), document_id)


class RowReader(Protocol):
    """Packs one row of the global batch."""

    def read(self, sequence: PackedSequence) -> RowSpan:
        """Fill ``sequence`` with the row's next one and return its span. Mutates ``sequence``."""
        ...

    @property
    def n_bad(self) -> int:
        """Unreadable records of the row so far, with those before documents that are read ahead."""
        ...


class ConcatPacker:
    """Concatenates documents and splits them at sequence ends.

    Every token is a label once; a document's first token follows the previous document's last.
    """

    def __init__(self, documents: RowStream, start: RowState, *, padding_id: int) -> None:
        self._documents, self._padding_id = documents, padding_id
        # The document in which the next sequence starts, and the state there.
        self._state, self._document = start, np.empty(0, np.int64)
        self._has_started = False

    def read(self, sequence: PackedSequence) -> RowSpan:
        tokens, labels = sequence.tokens, sequence.labels
        start, token, filled = self._state, self._state.token, 0
        if not self._has_started:
            self._has_started = True
            self._begin_document(token)
        while True:
            ids = self._document[token : token + len(tokens) - filled]
            end = filled + len(ids)
            tokens[filled:end] = ids
            sequence.mark(filled, end, self._state.document)
            filled, token = end, token + len(ids)
            if token < len(self._document):
                last_label = self._document[token]
                break
            token = 0
            if not self._begin_document(0):
                last_label = IGNORE_INDEX
                break
        labels[: max(filled - 1, 0)] = tokens[1:filled]
        labels[filled - 1 : filled] = last_label
        sequence.pad(filled, self._state.document, self._padding_id)
        self._state = self._state._replace(token=token)
        return RowSpan(self._documents.row, start, self._state)

    @property
    def n_bad(self) -> int:
        return self._state.bad

    def _begin_document(self, token: int) -> bool:
        found = self._documents.read()
        if found is None:
            self._state, self._document = self._documents.state, np.empty(0, np.int64)
            return False
        before, self._document = found
        self._state = before._replace(token=token)
        return True


class BestFitPacker:
    """Keeps documents whole that fit; splits longer ones into full sequences and a remainder.

    Packs a window of documents by best fit decreasing. Labels never cross documents, so a
    document's last token is only a label, and every token but its first is a label once.
    """

    def __init__(self, documents: RowStream, start: RowState, *, padding_id: int) -> None:
        self._documents, self._padding_id = documents, padding_id
        self._state = self._next_state = start
        self._window: list[list[np.ndarray]] = []
        # Chunks read for the next window.
        self._chunks: list[np.ndarray] = []
        self._n_tokens = 0

    def read(self, sequence: PackedSequence) -> RowSpan:
        tokens, labels = sequence.tokens, sequence.labels
        if not self._window:
            self._pack(len(tokens))
        start, filled = self._state, 0
        chunks = self._window[start.token] if self._window else []
        for number, chunk in enumerate(chunks):
            end = filled + len(chunk) - 1
            tokens[filled:end], labels[filled:end] = chunk[:-1], chunk[1:]
            sequence.mark(filled, end, number)
            filled = end
        sequence.pad(filled, len(chunks), self._padding_id)
        # Every call reads a fraction of the next window, so that no call takes much longer.
        if start.token + 1 < len(self._window):
            self._state = start._replace(token=start.token + 1)
            self._read_ahead(min(start.token + 1, WINDOW_SEQUENCES), len(tokens))
        else:
            self._state, self._window = self._next_state, []
        return RowSpan(self._documents.row, start, self._state)

    @property
    def n_bad(self) -> int:
        return self._documents.state.bad

    def _pack(self, seq_len: int) -> None:
        """Pack the next window's chunks into sequences; none at the end of the data."""
        self._read_ahead(WINDOW_SEQUENCES, seq_len)
        chunks = self._chunks
        packed = best_fit([len(chunk) - 1 for chunk in chunks], seq_len)
        self._window = [[chunks[index] for index in indices] for indices in packed]
        self._chunks, self._n_tokens, self._next_state = [], 0, self._documents.state

    def _read_ahead(self, n_sequences: int, seq_len: int) -> None:
        """Read documents until they fill ``n_sequences`` of the next window, or the data end."""
        # Documents of one token give no chunk, so continue until there is one.
        while self._n_tokens < n_sequences * seq_len or not self._chunks:
            found = self._documents.read()
            if found is None:
                return
            _, ids = found
            # A view of a file would keep it open until its window is read.
            ids = ids.copy()
            starts = range(0, len(ids) - 1, seq_len)
            self._chunks += [ids[start : start + seq_len + 1] for start in starts]
            self._n_tokens += len(ids)


def best_fit(sizes: list[int], capacity: int) -> list[list[int]]:
    """Pack ``sizes`` into bins of ``capacity`` by best fit decreasing; sorted bins of indices."""
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (free space, bin), sorted
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        at = bisect.bisect_left(free, (sizes[index], -1))
        if at == len(free):
            space, number = capacity, len(bins)
            bins.append([])
        else:
            space, number = free.pop(at)
        bins[number].append(index)
        bisect.insort(free, (space - sizes[index], number))
    return sorted(sorted(indices) for indices in bins)
