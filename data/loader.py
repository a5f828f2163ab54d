"""Documents packed into batches: this rank's rows of every global batch, prepared in a thread."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from config import ConfigError
from data.sources import Source
from data.tokenizer import Tokenizer

MAX_EMPTY_DOCUMENTS = 100_000

# A document of a row, counted from 0, and a token in it.
Place = tuple[int, int]


class Span(NamedTuple):
    """Which part of its row a sequence is: from its first token to the next sequence's first."""

    row: int
    start: Place
    end: Place


class Batch(NamedTuple):
    """One microbatch of this rank; its tensors are (b, s) int64 on the CPU."""

    tokens: torch.Tensor
    labels: torch.Tensor
    """The next token of each."""
    positions: torch.Tensor | None
    """Place within its document; None: within the sequence."""
    document_ids: torch.Tensor | None
    """Documents to attend within; None: attend to the whole past."""
    spans: tuple[Span, ...] = ()
    """Of each row, what was read."""

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """What the model takes."""
        return self.tokens, self.positions, self.document_ids


class RowReader:
    """One row of the global batch: its documents, concatenated and cut into sequences."""

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        row: int,
        start: Place,
        *,
        n_rows: int,
        vocab_size: int,
    ) -> None:
        self._source, self._tokenizer, self._vocab_size = source, tokenizer, vocab_size
        self._row, self._start = row, start
        self._next_document, self._cursor = start
        self._texts = source.documents(row, n_rows, self._next_document)
        # What is read ahead, three facts per token: its id, its document, its place in that.
        self._buffer = np.empty((3, 0), np.int64)

    def read(self, seq_len: int) -> tuple[np.ndarray, np.ndarray, Span]:
        """seq_len + 1 tokens, the number of each one's document, and what part of the row it is.

        The next read starts at the last of them, so every token is predicted exactly once.
        """
        documents = [self._buffer]
        missing = self._cursor + seq_len + 1 - self._buffer.shape[1]
        while missing > 0:
            documents.append(self._read_document())
            missing -= documents[-1].shape[1]
        if len(documents) > 1:
            self._buffer = np.concatenate(documents, axis=1)[:, self._cursor :]
            self._cursor = 0
        tokens, numbers, places = self._buffer[:, self._cursor : self._cursor + seq_len + 1]
        self._check_ids(tokens, numbers)
        self._cursor += seq_len
        start, self._start = self._start, (int(numbers[-1]), int(places[-1]))
        return tokens, numbers, Span(self._row, start, self._start)

    def _check_ids(self, tokens: np.ndarray, numbers: np.ndarray) -> None:
        """No other guard is certain: an embedding that is split takes a foreign id for zeros."""
        if tokens.min() >= 0 and tokens.max() < self._vocab_size:
            return
        bad = np.flatnonzero((tokens < 0) | (tokens >= self._vocab_size))[0]
        raise ValueError(
            f"data: {self._source.description}: document {numbers[bad]} of row {self._row} has the"
            f" id {tokens[bad]}; model.vocab_size is {self._vocab_size}"
        )

    def _read_document(self) -> np.ndarray:
        """The next document that has text."""
        for document in islice(self._texts, MAX_EMPTY_DOCUMENTS):
            number, self._next_document = self._next_document, self._next_document + 1
            if len(document) > 0:
                tokens = document if isinstance(document, np.ndarray) else self._encode(document)
                facts = np.empty((3, len(tokens)), np.int64)
                facts[0], facts[1], facts[2] = tokens, number, np.arange(len(tokens))
                return facts
        raise ValueError(f"data: {MAX_EMPTY_DOCUMENTS:,} documents in a row have no text")

    def _encode(self, text: str) -> np.ndarray:
        ids = self._tokenizer.encode(text)
        return np.concatenate([[self._tokenizer.bos_id], ids, [self._tokenizer.eos_id]])


class BatchLoader:
    """This rank's microbatches, endless; what raises in the thread raises where they are taken.

    Microbatch ``a`` of a step has rows (a * degree + rank) * local_batch_size and on, so a global
    batch has the same rows on any number of ranks.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        seq_len: int,
        local_batch_size: int,
        global_batch_size: int,
        rank: int,
        degree: int,
        document_mask: bool,
        prefetch: int,
    ) -> None:
        assert global_batch_size % (local_batch_size * degree) == 0, "rows left over"
        self._source, self._tokenizer, self._vocab_size = source, tokenizer, vocab_size
        self._seq_len, self._document_mask = seq_len, document_mask
        self._n_rows, self._prefetch = global_batch_size, prefetch
        self.microbatches = global_batch_size // (local_batch_size * degree)
        """Microbatches of one step."""
        firsts = [(a * degree + rank) * local_batch_size for a in range(self.microbatches)]
        self._rows = [range(first, first + local_batch_size) for first in firsts]
        self._starts: dict[int, Place] = {row: (0, 0) for rows in self._rows for row in rows}
        self._microbatches = self._read_from_starts()
        self._ahead: deque[Future[Batch]] = deque()
        # What it runs refers to no loader, so that a loader that is dropped takes it along.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="data")

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        while len(self._ahead) <= self._prefetch:
            self._ahead.append(self._thread.submit(next, self._microbatches))
        batch = self._ahead[0].result()
        self._ahead.popleft()
        return batch

    def commit(self, microbatches: list[Batch]) -> None:
        """Count what was taken as trained on: a finished step. The state is what was committed."""
        self._starts |= {span.row: span.end for batch in microbatches for span in batch.spans}

    def state_dict(self) -> dict[str, Any]:
        """The place after the last step committed.

        This rank's part; the union over ranks is the state of the whole.
        """
        return {
            "source": self._source.fingerprint,
            "tokenizer": self._tokenizer.fingerprint,
            "global_batch_size": self._n_rows,
            "rows": {str(row): list(start) for row, start in self._starts.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the union of all ranks' states. Raises ``ConfigError`` on other data."""
        assert not self._ahead, "the loader has already started"
        own = self.state_dict()
        keys = {
            "source": "the documents of [data], or debug.seed, which orders them",
            "tokenizer": "data.tokenizer",
            "global_batch_size": "training.global_batch_size (absent, it follows the ranks)",
        }
        for key, name in keys.items():
            if state[key] != own[key]:
                text = f"{name} changed since the checkpoint: {state[key]} to {own[key]}"
                raise ConfigError([text])
        self._starts = {row: tuple(state["rows"][str(row)]) for row in self._starts}
        self._microbatches = self._read_from_starts()

    def _read_from_starts(self) -> Iterator[Batch]:
        readers = {
            row: RowReader(
                self._source,
                self._tokenizer,
                row,
                start,
                n_rows=self._n_rows,
                vocab_size=self._vocab_size,
            )
            for row, start in self._starts.items()
        }
        return _read_microbatches(readers, self._rows, self._seq_len, self._document_mask)


def _read_microbatches(
    readers: dict[int, RowReader], microbatches: list[range], seq_len: int, document_mask: bool
) -> Iterator[Batch]:
    """Each microbatch of rows, step after step."""
    while True:
        for rows in microbatches:
            yield _assemble([readers[row].read(seq_len) for row in rows], document_mask)


def _assemble(sequences: list[tuple[np.ndarray, np.ndarray, Span]], document_mask: bool) -> Batch:
    tokens = torch.from_numpy(np.stack([tokens for tokens, _, _ in sequences]))
    positions = document_ids = None
    if document_mask:
        numbers = np.stack([numbers[:-1] for _, numbers, _ in sequences])
        document_ids = torch.from_numpy(numbers)
        positions = torch.from_numpy(_places(numbers))
    return Batch(
        tokens[:, :-1].contiguous(),
        tokens[:, 1:].contiguous(),
        positions,
        document_ids,
        tuple(span for _, _, span in sequences),
    )


def _places(numbers: np.ndarray) -> np.ndarray:
    """For document numbers (b, s), each token's distance from where its document starts in s."""
    index = np.broadcast_to(np.arange(numbers.shape[1]), numbers.shape)
    is_start = np.diff(numbers, axis=1, prepend=-1) != 0
    return index - np.maximum.accumulate(np.where(is_start, index, 0), axis=1)
