"""A program that writes a ledger as train.py does, over real loaders."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from checkpoint.checkpointer import merge
from data.batch_size import Ramp, batch_size_of
from data.loader import Microbatch, MicrobatchLoader
from data.sources import ShuffledDocuments, Source
from metrics.ledger import AttemptHeader, Ledger
from tests.lib.loaders import ROWS, SEQ_LEN, build, documents
from tools.check_ledger import Lineage

State = dict[str, Any]


def source(seed: int = 5, count: int = 40) -> Source:
    texts = documents(count, longest=2 * SEQ_LEN)
    return ShuffledDocuments(
        texts, np.arange(count), seed=seed, name="training", fingerprint="texts"
    )


def loaders(degree: int, cls: type = MicrobatchLoader) -> list[MicrobatchLoader]:
    found = [build(source(), degree, rank) for rank in range(degree)]
    for loader in found:
        loader.__class__ = cls
    return found


@dataclass(frozen=True)
class Start:
    """One start of the program."""

    world: int
    last: int
    """Last finished step."""
    resumed_from: int = 0
    tp: int = 1
    """Number of ranks that read the same rows."""
    in_step: int = 0
    """Number of ranks that also logged the next step, before another one was killed."""


class Program:
    """A small ``train.py``: the data state of its checkpoints, and its ledger."""

    def __init__(self, folder: Path, cls: type = MicrobatchLoader, ramp: Ramp = ()) -> None:
        self.folder, self._cls, self._ramp = folder, cls, ramp
        self.saved: dict[int, tuple[str, State]] = {}
        """By step: the attempt that saved it, and the loaders' state."""
        self._attempts = 0

    def run(
        self,
        start: Start,
        *,
        loaders: Callable[[int, type], list[MicrobatchLoader]] = loaders,
        first_step: int | None = None,
        data_of: int | None = None,
        data_after: int | None = None,
    ) -> "Program":
        """``first_step``, and ``data_of`` (the step whose data are restored), inject faults."""
        name, self._attempts = f"attempt{self._attempts}", self._attempts + 1
        self.readers = readers = loaders(start.world // start.tp, self._cls)
        c = start.resumed_from
        data = c if data_after is None else data_after
        if (place := data if data_of is None else data_of) > 0:
            for reader in readers:
                reader.load_state_dict(self.saved[place][1])
        attempt = AttemptHeader(
            attempt=name,
            parent=self.saved[c][0] if c else None,
            resumed_from=c,
            data_after=data,
            world_size=start.world,
            rank=0,
            dp_rank=0,
            n_rows=ROWS,
            ramp=self._ramp,
        )
        ledgers = [
            Ledger(self.folder / "ledger", replace(attempt, rank=rank, dp_rank=rank // start.tp))
            for rank in range(start.world)
        ]
        for step in range(first_step or c + 1, start.last + 1):
            for reader, batches in zip(
                readers, self._step(step, readers, ledgers, start.tp), strict=True
            ):
                reader.commit(batches)
            self.saved[step] = name, reduce(merge, [reader.state_dict() for reader in readers])
        if start.in_step:
            self._step(start.last + 1, readers, ledgers[: start.in_step], start.tp)
        for ledger in ledgers:
            ledger.sync()
            ledger.close()
        return self

    def _step(
        self, step: int, readers: list[MicrobatchLoader], ledgers: list[Ledger], tp: int
    ) -> list[list[Microbatch]]:
        n_rows = batch_size_of(step, self._ramp, ROWS)
        count = readers[0].n_microbatches * n_rows // ROWS
        microbatches = [list(islice(reader, count)) for reader in readers]
        loss = value(microbatches)
        for rank, ledger in enumerate(ledgers):
            ledger.log(step, microbatches[rank // tp], loss=loss, grad_norm=loss / 3)
        return microbatches


def value(microbatches: list[list[Microbatch]]) -> float:
    """A loss that depends on every token."""
    rows = {
        span.row: zlib.crc32(tokens.numpy())
        for batches in microbatches
        for batch in batches
        for span, tokens in zip(batch.spans, batch.tokens, strict=True)
    }
    return sum(crc / (7 + row) for row, crc in sorted(rows.items()))


def sequences(lineage: Lineage) -> list[list[int]]:
    """Ledger rows in the order in which they were read."""
    found, next_row = [], 0
    for _, entry in sorted(lineage.steps.items()):
        rows = sorted(entry.rows.tolist(), key=lambda row: (row[0] - next_row) % ROWS)
        next_row = (next_row + len(rows)) % ROWS
        found += rows
    return found
