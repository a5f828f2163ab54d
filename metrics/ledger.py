"""Ledger: a record of the data that each step consumed, its loss and its gradient norm.

Each rank appends to ``ledger/rank-00000.jsonl``: one line per attempt (a start of the program, or
what follows a rollback) with the checkpoint it resumed from, then one line per finished step.
``./shardloom check-ledger RUN_FOLDER`` reads the files.
"""

import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from runtime.run_folder import LineFile

if TYPE_CHECKING:  # tools.check_ledger needs no torch.
    import numpy as np
    import torch


class RowState(Protocol):
    """Position of a row in its documents."""

    @property
    def position(self) -> tuple[int, int]: ...  # document of the row, token in that document


class Microbatch(Protocol):
    """One microbatch of this rank, and the span of its row that each sequence holds."""

    @property
    def tokens(self) -> "torch.Tensor": ...  # (b, s) int64, on the CPU
    @property
    def labels(self) -> "torch.Tensor": ...
    @property
    def spans(self) -> Iterable[tuple[int, RowState, RowState]]: ...


@dataclass(frozen=True, kw_only=True)
class AttemptHeader:
    """First line of an attempt. All fields but ``rank`` and ``dp_rank`` are equal on all ranks."""

    attempt: str
    """Name of the attempt, unique in the run."""
    parent: str | None
    """Attempt that saved the checkpoint this one resumed from. None: it did not resume."""
    resumed_from: int
    """Step of that checkpoint; 0 without one."""
    data_after: int
    """Data after this step are read next: ``resumed_from``, or later to skip data on purpose."""
    world_size: int
    rank: int
    dp_rank: int
    """Data-parallel rank. Ranks of equal ``dp_rank`` read the same rows."""
    n_rows: int
    """Rows of the global batch."""
    ramp: Sequence[Sequence[int]] = field(default_factory=list)
    """Batch-size ramp: (steps, rows per step) of each phase before the full ``n_rows``."""


class Ledger:
    """Ledger file of this rank. A step counts only if every rank has a line for it.

    A line that cannot be written is an alarm; ``tools.check_ledger`` names the step as unknown.
    """

    def __init__(self, folder: Path, attempt: AttemptHeader) -> None:
        self._file = LineFile(folder / f"rank-{attempt.rank:05d}.jsonl")
        self.begin(attempt)

    def begin(self, attempt: AttemptHeader) -> None:
        """Start another attempt; a rollback is one."""
        self._write(asdict(attempt))

    def log(
        self,
        step: int,
        microbatches: Iterable[Microbatch],
        *,
        loss: float,
        grad_norm: float,
        n_empty_rows: int = 0,
    ) -> None:
        """Record a finished step: this rank's microbatches, the global loss and gradient norm.

        ``n_empty_rows``: as in ``StepBatch``; ``microbatches`` begin with this rank's of them.
        """
        rows = [
            [row, *start.position, *end.position, _crc32(tokens, labels)]
            for batch in microbatches
            for (row, start, end), tokens, labels in zip(
                batch.spans, batch.tokens.numpy(), batch.labels.numpy(), strict=True
            )
        ]
        values = {"loss": loss.hex(), "grad_norm": grad_norm.hex()}
        empty = {"empty_rows": n_empty_rows} if n_empty_rows else {}
        self._write({"step": step, "rows": rows, **values, **empty})

    def sync(self) -> None:
        """Flush the file to disk (fsync), as the checkpoint that commits next."""
        self._file.sync()

    def close(self) -> None:
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")))


def _crc32(tokens: "np.ndarray", labels: "np.ndarray") -> int:
    """Return the CRC-32 of a row's ``tokens`` and last label; both arguments (s,) int64."""
    return zlib.crc32(labels[-1:].data, zlib.crc32(tokens.data))
