"""Documents into sequences: one after the other and cut, or whole where they fit."""

import bisect
from typing import NamedTuple, Protocol

import numpy as np

from data.mixture import MixedRow, RowState
from runtime.labels import IGNORED

# Sequences that best_fit packs at once: more waste less room, but take longer to resume from.
WINDOW = 64


class Span(NamedTuple):
    """Which part of its row a sequence is: from its first token to the next sequence's first."""

    row: int
    start: RowState
    end: RowState


class Sequence(NamedTuple):
    """What a reader fills: (s,) int64 arrays."""

    tokens: np.ndarray
    labels: np.ndarray
    """The next token at each position, or IGNORED."""
    document_ids: np.ndarray | None
    """Each token's document, unique within the sequence. None: not asked for."""
    positions: np.ndarray | None
    """Each token's place within the document's part of the sequence."""

    def mark(self, begin: int, end: int, document_id: int) -> None:
        """Mark the tokens from ``begin`` to ``end`` as those of one document."""
        if self.document_ids is not None and self.positions is not None:
            self.document_ids[begin:end] = document_id
            self.positions[begin:end] = np.arange(end - begin)


class RowReader(Protocol):
    """One row of the global batch."""

    def read(self, sequence: Sequence) -> Span:
        """Fill the row's next sequence, and say what part of the row it is."""
        ...


class Concatenated:
    """Documents one after the other, cut where a sequence ends, so that every token is predicted
    once, the first of a document from the last of the one before."""

    def __init__(self, documents: MixedRow, start: RowState, *, filler: int) -> None:
        self._documents, self._filler = documents, filler
        # The document that the next sequence starts in, and where in it.
        self._state, self._document = start, np.empty(0, np.int64)
        self._is_begun = False

    def read(self, sequence: Sequence) -> Span:
        tokens, labels = sequence.tokens, sequence.labels
        start, token, filled = self._state, self._state.token, 0
        if not self._is_begun:
            self._is_begun = True
            self._begin_document(token)
        while True:
            part = self._document[token : token + len(tokens) - filled]
            end = filled + len(part)
            tokens[filled:end] = part
            sequence.mark(filled, end, self._state.document)
            filled, token = end, token + len(part)
            if token < len(self._document):
                last_label = self._document[token]
                break
            token = 0
            if not self._begin_document(0):
                last_label = IGNORED
                break
        labels[: max(filled - 1, 0)] = tokens[1:filled]
        labels[filled - 1 : filled] = last_label
        labels[filled:] = IGNORED
        tokens[filled:] = self._filler
        sequence.mark(filled, len(tokens), self._state.document)
        self._state = self._state._replace(token=token)
        return Span(self._documents.row, start, self._state)

    def _begin_document(self, token: int) -> bool:
        found = self._documents.read()
        if found is None:
            # The state after the last document.
            self._state, self._document = self._documents.state, np.empty(0, np.int64)
            return False
        before, self._document = found
        self._state = before._replace(token=token)
        return True


class BestFit:
    """Documents that fit stay whole; longer ones are cut into full sequences and a rest.

    Within a window of documents, each piece goes where it leaves the least room (best fit
    decreasing).
    An input has a label of its own document, or none, so a document's last token is only a label.
    Every token but the first of a document is predicted once.
    """

    def __init__(self, documents: MixedRow, start: RowState, *, filler: int) -> None:
        self._documents, self._filler = documents, filler
        self._state = self._after = start
        self._window: list[list[np.ndarray]] = []
        # What was gathered for the next window.
        self._pieces: list[np.ndarray] = []
        self._n_tokens = 0

    def read(self, sequence: Sequence) -> Span:
        tokens, labels = sequence.tokens, sequence.labels
        if not self._window:
            self._pack(len(tokens))
        start, filled = self._state, 0
        pieces = self._window[start.token] if self._window else []
        for number, piece in enumerate(pieces):
            end = filled + len(piece) - 1
            tokens[filled:end], labels[filled:end] = piece[:-1], piece[1:]
            sequence.mark(filled, end, number)
            filled = end
        tokens[filled:], labels[filled:] = self._filler, IGNORED
        sequence.mark(filled, len(tokens), len(pieces))
        # Each sequence gathers a part of the next window, so that none takes much longer.
        if start.token + 1 < len(self._window):
            self._state = start._replace(token=start.token + 1)
            self._gather(min(start.token + 1, WINDOW), len(tokens))
        else:
            self._state, self._window = self._after, []
        return Span(self._documents.row, start, self._state)

    def _pack(self, seq_len: int) -> None:
        """Pack the next window's pieces into sequences; none at the end of all documents."""
        self._gather(WINDOW, seq_len)
        pieces = self._pieces
        packed = best_fit([len(piece) - 1 for piece in pieces], seq_len)
        self._window = [[pieces[index] for index in indices] for indices in packed]
        self._pieces, self._n_tokens, self._after = [], 0, self._documents.state

    def _gather(self, n_sequences: int, seq_len: int) -> None:
        # Documents of one token leave no piece, so read on until there is one.
        while self._n_tokens < n_sequences * seq_len or not self._pieces:
            found = self._documents.read()
            if found is None:
                return
            _, ids = found
            starts = range(0, len(ids) - 1, seq_len)
            self._pieces += [ids[start : start + seq_len + 1] for start in starts]
            self._n_tokens += len(ids)


def best_fit(sizes: list[int], capacity: int) -> list[list[int]]:
    """Bins of indices of ``sizes``, each bin sorted, by first index; largest placed first."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, bin), sorted
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        at = bisect.bisect_left(rooms, (sizes[index], -1))
        if at == len(rooms):
            room, number = capacity, len(bins)
            bins.append([])
        else:
            room, number = rooms.pop(at)
        bins[number].append(index)
        bisect.insort(rooms, (room - sizes[index], number))
    return sorted(sorted(indices) for indices in bins)
