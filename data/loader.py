"""Documents packed into batches: this rank's rows of every global batch, prepared in a thread."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from config import ConfigError
from config.job_config import Packing
from data.mixture import MixedRow, Mixture, RowState
from data.packing import BestFit, Concatenated, RowReader, Sequence, Span
from data.tokenizer import Tokenizer
from runtime.labels import IGNORED


class Batch(NamedTuple):
    """One microbatch of this rank; its tensors are (b, s) int64 on the CPU."""

    tokens: torch.Tensor
    labels: torch.Tensor
    """The next token at each position; IGNORED where none is to be predicted."""
    positions: torch.Tensor | None = None
    """Place within its document; None: within the sequence."""
    document_ids: torch.Tensor | None = None
    """Documents to attend within; None: attend to the whole past."""
    spans: tuple[Span, ...] = ()
    """What was read of each row."""

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """What the model takes."""
        return self.tokens, self.positions, self.document_ids


def count_valid(microbatches: list[Batch]) -> int:
    """Labels of this rank's rows that count."""
    return sum(int((batch.labels != IGNORED).sum()) for batch in microbatches)


class BatchLoader:
    """This rank's microbatches, endless; an error in the thread is raised where they are taken.

    After the end of the mixture, all labels are IGNORED.

    Microbatch ``a`` has rows from (a * degree + rank) * local_batch_size on; they go round and
    round the rows of a global batch. So a step, be it a global batch or a part of one, has the rows
    that follow those of the step before, on any number of ranks.
    """

    def __init__(
        self,
        mixture: Mixture,
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
        packing: Packing = "concat",
        pin_memory: bool = False,
    ) -> None:
        """``pin_memory``: so that a GPU can copy the batches while the host goes on."""
        assert global_batch_size % (local_batch_size * degree) == 0, "rows left over"
        self._mixture, self._tokenizer, self._vocab_size = mixture, tokenizer, vocab_size
        self._seq_len, self._document_mask = seq_len, document_mask
        self._n_rows, self._prefetch, self._packing = global_batch_size, prefetch, packing
        self._pin_memory = pin_memory
        self.microbatches = global_batch_size // (local_batch_size * degree)
        """Microbatches of one global batch."""
        firsts = [(a * degree + rank) * local_batch_size for a in range(self.microbatches)]
        self._rows_after_next = [range(first, first + local_batch_size) for first in firsts]
        self._next_row, self._rows_at_once = 0, local_batch_size * degree
        nothing = (0,) * len(mixture.sources)
        start = RowState(nothing, nothing, bad=0, source=0, token=0)
        self._taken: dict[int, RowState] = {}
        self._starts = {row: start for rows in self._own_rows() for row in rows}
        self._microbatches = self._read_from_starts()
        self._ahead: deque[Future[Batch]] = deque()
        # What it runs does not refer to the loader, so that it ends when the loader is dropped.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="data")

    def __iter__(self) -> Iterator[Batch]:
        return self

    def start(self) -> None:
        """Read ahead. The first thread that tokenizes is faster at it than those that come later
        (regular expressions keep their scratch space for it): start the busiest loader first.
        """
        while len(self._ahead) <= self._prefetch:
            self._ahead.append(self._thread.submit(next, self._microbatches))

    def __next__(self) -> Batch:
        self.start()
        batch = self._ahead[0].result()
        self._ahead.popleft()
        self._taken |= {span.row: span.end for span in batch.spans}
        return batch

    @property
    def n_bad(self) -> int:
        """Records that could not be read, in this rank's rows, up to what was taken."""
        return sum(state.bad for state in (self._starts | self._taken).values())

    def commit(self, microbatches: list[Batch]) -> None:
        """Count a finished step's microbatches as trained on; only such are in the state."""
        n_taken = len(microbatches) * self._rows_at_once
        self._next_row = (self._next_row + n_taken) % self._n_rows
        self._starts |= {span.row: span.end for batch in microbatches for span in batch.spans}

    def state_dict(self) -> dict[str, Any]:
        """The place after the last step committed.

        This rank's part; the union over ranks is the state of the whole.
        """
        return {
            "source": self._mixture.fingerprint,
            "tokenizer": self._tokenizer.fingerprint,
            "global_batch_size": self._n_rows,
            "next_row": self._next_row,
            # best_fit packs differently for another length.
            "packing": f"best_fit {self._seq_len}" if self._packing == "best_fit" else "concat",
            "rows": {str(row): start.as_json() for row, start in self._starts.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the union of all ranks' states. Raises ``ConfigError`` on other data."""
        assert not self._ahead, "the loader has already started"
        own = self.state_dict()
        keys = {
            "source": "the documents of [data], their weights, or debug.seed, which orders them",
            "tokenizer": "data.tokenizer",
            "global_batch_size": "training.global_batch_size",
            "packing": "data.packing, or with best_fit training.seq_len,",
        }
        for key, name in keys.items():
            if state[key] != own[key]:
                text = f"{name} changed since the checkpoint: {state[key]} to {own[key]}"
                raise ConfigError([text])
        # Microbatches begin at that row.
        self._next_row = state.get("next_row", 0)
        rows = [row for rows in self._own_rows() for row in rows]
        self._starts = {row: RowState.of_json(state["rows"][str(row)]) for row in rows}
        self._microbatches = self._read_from_starts()

    def consumed(self) -> list[tuple[int, int]]:
        """For each source, documents and tokens that this rank's rows have finished; with best_fit,
        those before the documents that are packed together now."""
        starts = self._starts.values()
        taken = np.sum([start.taken for start in starts], axis=0)
        tokens = np.sum([start.tokens for start in starts], axis=0)
        if self._packing == "concat":
            for start in starts:
                tokens[start.source] += start.token
        return list(zip(taken.tolist(), tokens.tolist(), strict=True))

    def _own_rows(self) -> list[list[int]]:
        """This rank's rows in each microbatch; the first microbatch begins at the next row."""
        n, first = self._n_rows, self._next_row
        return [[(first + row) % n for row in rows] for rows in self._rows_after_next]

    def _read_from_starts(self) -> Iterator[Batch]:
        kind = BestFit if self._packing == "best_fit" else Concatenated
        readers: dict[int, RowReader] = {}
        for row, start in self._starts.items():
            documents = MixedRow(
                self._mixture,
                self._tokenizer,
                row,
                start,
                n_rows=self._n_rows,
                vocab_size=self._vocab_size,
            )
            readers[row] = kind(documents, start, filler=self._tokenizer.eos_id)
        read = partial(
            _read_microbatch,
            seq_len=self._seq_len,
            document_mask=self._document_mask,
            pin_memory=self._pin_memory,
        )
        return _read_microbatches(readers, self._own_rows(), read)


def _read_microbatches(
    readers: dict[int, RowReader],
    microbatches: list[list[int]],
    read: Callable[[list[RowReader]], Batch],
) -> Iterator[Batch]:
    """Read the rows of each microbatch in turn, again and again."""
    while True:
        for rows in microbatches:
            yield read([readers[row] for row in rows])


def _read_microbatch(
    readers: list[RowReader], *, seq_len: int, document_mask: bool, pin_memory: bool
) -> Batch:
    batch = torch.empty((4, len(readers), seq_len), dtype=torch.int64, pin_memory=pin_memory)
    tokens, labels, document_ids, positions = batch.numpy()
    spans = []
    for index, reader in enumerate(readers):
        marks = (document_ids[index], positions[index]) if document_mask else (None, None)
        spans.append(reader.read(Sequence(tokens[index], labels[index], *marks)))
    return Batch(
        batch[0],
        batch[1],
        batch[3] if document_mask else None,
        batch[2] if document_mask else None,
        tuple(spans),
    )
