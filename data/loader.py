"""Data loader: this dp rank's rows of every global batch, prefetched by a background thread."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from config import ConfigError
from config.job_config import Packing
from config.resume_compat import NEW_JOB_HINT
from data.mixture import Mixture, RowState, RowStream
from data.packing import BestFitPacker, ConcatPacker, PackedSequence, RowReader, RowSpan
from data.tokenizer import Tokenizer
from runtime.labels import IGNORE_INDEX


class Microbatch(NamedTuple):
    """One microbatch of this rank; its tensors are (b, s) int64 on the CPU."""

    tokens: torch.Tensor
    labels: torch.Tensor
    """The next token at each position, or IGNORE_INDEX."""
    positions: torch.Tensor | None = None
    """Position of each token within its document; None: within the sequence."""
    document_ids: torch.Tensor | None = None
    """Document of each token, to mask attention; None: plain causal attention."""
    spans: tuple[RowSpan, ...] = ()
    """The span of its row that each sequence holds."""
    n_bad: tuple[int, ...] = ()
    """Unreadable records of each sequence's row so far."""

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The model's inputs: tokens, positions, document ids."""
        return self.tokens, self.positions, self.document_ids


def num_target_tokens(microbatches: list[Microbatch]) -> int:
    """Number of labels of this rank that are not IGNORE_INDEX."""
    return sum(int((batch.labels != IGNORE_INDEX).sum()) for batch in microbatches)


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """Shape of the batches, and this rank's rows of them."""

    vocab_size: int
    seq_len: int
    microbatch_size: int
    """Rows of a microbatch on this rank."""
    global_batch_size: int
    dp_rank: int
    dp_degree: int
    document_mask: bool
    prefetch: int
    """Microbatches to read ahead."""
    packing: Packing = "concat"
    pin_memory: bool = False
    """Pin the batches, so that copies to a GPU are asynchronous."""


class MicrobatchLoader:
    """Endless iterator over this rank's microbatches; ``next`` raises errors of its thread.

    After the end of the mixture, all labels are IGNORE_INDEX.

    Counted from the start or the last resume, this rank's microbatch ``a`` has the
    ``microbatch_size`` rows from next_row + (a * dp_degree + dp_rank) * microbatch_size on, modulo
    ``global_batch_size``. Each step therefore continues with the row after the previous step's last
    one, whatever the batch size of a step and the dp degree.
    """

    def __init__(self, mixture: Mixture, tokenizer: Tokenizer, config: LoaderConfig) -> None:
        self._mixture, self._tokenizer, self._config = mixture, tokenizer, config
        size, dp_degree = config.microbatch_size, config.dp_degree
        assert config.global_batch_size % (size * dp_degree) == 0, "rows left over"
        self.n_microbatches = config.global_batch_size // (size * dp_degree)
        """Number of this rank's microbatches in a global batch."""
        firsts = [(a * dp_degree + config.dp_rank) * size for a in range(self.n_microbatches)]
        self._row_offsets = [range(first, first + size) for first in firsts]
        self._next_row, self._rows_per_microbatch = 0, size * dp_degree
        zeros = (0,) * len(mixture.sources)
        start = RowState(zeros, zeros, bad=0, source=0, token=0)
        self._committed = {row: start for rows in self._own_rows() for row in rows}
        self._n_bad = dict.fromkeys(self._committed, 0)
        self._microbatches = self._build_microbatches()
        self._prefetched: deque[Future[Microbatch]] = deque()
        # The thread holds no reference to the loader, so it also ends when the loader is deleted,
        # but only after all reads that ``start`` has queued.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="data")

    def __iter__(self) -> Iterator[Microbatch]:
        return self

    def start(self) -> None:
        """Start prefetching; call it on the busiest loader first.

        The first thread that tokenizes is the fastest, because regex engines reserve their scratch
        space for it.
        """
        while len(self._prefetched) <= self._config.prefetch:
            self._prefetched.append(self._thread.submit(next, self._microbatches))

    def close(self) -> None:
        """Read no more: the thread ends after the microbatch that it is reading."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def __next__(self) -> Microbatch:
        self.start()
        batch = self._prefetched[0].result()
        self._prefetched.popleft()
        rows = (span.row for span in batch.spans)
        self._n_bad |= dict(zip(rows, batch.n_bad, strict=True))
        return batch

    @property
    def n_bad(self) -> int:
        """Number of unreadable records so far in this rank's rows, uncommitted steps included."""
        return sum(self._n_bad.values())

    def commit(self, microbatches: list[Microbatch]) -> None:
        """Mark a finished step's microbatches as consumed; the state includes only these."""
        n_consumed = len(microbatches) * self._rows_per_microbatch
        self._next_row = (self._next_row + n_consumed) % self._config.global_batch_size
        self._committed |= {span.row: span.end for batch in microbatches for span in batch.spans}

    def state_dict(self) -> dict[str, Any]:
        """This rank's position after the last committed step; the union over ranks is the whole."""
        return {
            "source": self._mixture.fingerprint,
            "tokenizer": self._tokenizer.fingerprint,
            "global_batch_size": self._config.global_batch_size,
            "next_row": self._next_row,
            # With another seq_len best_fit packs other sequences.
            "packing": f"best_fit {self._config.seq_len}"
            if self._config.packing == "best_fit"
            else "concat",
            "rows": {str(row): start.as_json() for row, start in self._committed.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the union of all ranks' states; raise ``ConfigError`` if the data differ."""
        assert not self._prefetched, "the loader has already started"
        own = self.state_dict()
        keys = {
            "source": "the documents of [data], their weights, repeat of one of several sources,"
            " or debug.seed, which orders them,",
            "tokenizer": "data.tokenizer, data.bos or data.eos",
            "global_batch_size": "training.global_batch_size",
            "packing": "data.packing, or with best_fit training.seq_len,",
        }
        for key, name in keys.items():
            is_resumable = key == "source" and state[key] in self._mixture.resumable_fingerprints
            if state[key] != own[key] and not is_resumable:
                text = f"{name} changed since the checkpoint: {state[key]} to {own[key]}"
                raise ConfigError([f"{text}; {NEW_JOB_HINT}"])
        # Older checkpoints have no next_row.
        self._next_row = state.get("next_row", 0)
        rows = [row for rows in self._own_rows() for row in rows]
        self._committed = {row: RowState.from_json(state["rows"][str(row)]) for row in rows}
        self._n_bad = {row: start.bad for row, start in self._committed.items()}
        self._microbatches = self._build_microbatches()

    def consumed(self) -> list[tuple[int, int]]:
        """(finished documents, tokens) of each source that this rank's rows have committed.

        With best_fit, the documents of the current packing window do not count yet.
        """
        starts = self._committed.values()
        taken = np.sum([start.taken for start in starts], axis=0)
        tokens = np.sum([start.tokens for start in starts], axis=0)
        if self._config.packing == "concat":
            for start in starts:
                tokens[start.source] += start.token
        return list(zip(taken.tolist(), tokens.tolist(), strict=True))

    def _own_rows(self) -> list[list[int]]:
        """This rank's rows of each microbatch, from the next row on."""
        n, first = self._config.global_batch_size, self._next_row
        return [[(first + row) % n for row in rows] for rows in self._row_offsets]

    def _build_microbatches(self) -> Iterator[Microbatch]:
        packer = BestFitPacker if self._config.packing == "best_fit" else ConcatPacker
        readers: dict[int, RowReader] = {}
        for row, start in self._committed.items():
            documents = RowStream(
                self._mixture,
                self._tokenizer,
                row,
                start,
                n_rows=self._config.global_batch_size,
                vocab_size=self._config.vocab_size,
            )
            readers[row] = packer(documents, start, padding_id=self._tokenizer.eos_id)
        read = partial(
            _read_microbatch,
            seq_len=self._config.seq_len,
            document_mask=self._config.document_mask,
            pin_memory=self._config.pin_memory,
        )
        return _read_microbatches(readers, self._own_rows(), read)


def _read_microbatches(
    readers: dict[int, RowReader],
    rows_of_microbatches: list[list[int]],
    read: Callable[[list[RowReader]], Microbatch],
) -> Iterator[Microbatch]:
    """Read the microbatches of each global batch in order, without end."""
    while True:
        for rows in rows_of_microbatches:
            yield read([readers[row] for row in rows])


def _read_microbatch(
    readers: list[RowReader], *, seq_len: int, document_mask: bool, pin_memory: bool
) -> Microbatch:
    shape = (4 if document_mask else 2, len(readers), seq_len)
    batch = torch.empty(shape, dtype=torch.int64, pin_memory=pin_memory)
    tokens, labels, *masks = batch.numpy()
    spans = []
    for index, reader in enumerate(readers):
        mask = [plane[index] for plane in masks] or [None, None]
        spans.append(reader.read(PackedSequence(tokens[index], labels[index], *mask)))
    return Microbatch(
        batch[0],
        batch[1],
        batch[3] if document_mask else None,
        batch[2] if document_mask else None,
        tuple(spans),
        tuple(reader.n_bad for reader in readers),
    )
