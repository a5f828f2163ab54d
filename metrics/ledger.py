"""What each step consumed and gave, on disk as soon as the step is done: the receipt of a run.

Every rank has a file of its own, ``ledger/rank-00000.jsonl``. An attempt (one start of the program)
begins with a line that says what it resumed from; a line per finished step follows.
``python -m tools.check_ledger RUN_FOLDER`` reads them.
"""

import json
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Protocol, TextIO

import numpy as np
import torch


class State(Protocol):
    @property
    def place(self) -> tuple[int, int]: ...  # a document of the row, and a token in it


class Microbatch(Protocol):
    @property
    def tokens(self) -> torch.Tensor: ...  # (b, s) int64, on the CPU
    @property
    def labels(self) -> torch.Tensor: ...
    @property
    def spans(self) -> Iterable[tuple[int, State, State]]: ...


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The first line of an attempt. All but ``rank`` and ``place`` is the same on every rank."""

    attempt: str
    """Its name; no other attempt of the run has it."""
    parent: str | None
    """The attempt that saved the checkpoint it resumed from. None: it did not resume."""
    resumed_from: int
    """That checkpoint's step, as the checkpoint says; 0 without one."""
    data_after: int
    """The step after which the data go on: ``resumed_from``, or a later one whose data, and those
    before it, are left out on purpose."""
    world_size: int
    rank: int
    place: int
    """Its number among ranks that read different rows; ranks of equal place read the same."""
    n_rows: int
    """Rows of the global batch."""
    ramp: Sequence[Sequence[int]] = field(default_factory=list)
    """Phases before steps have so many: (steps, rows in each of them)."""


class Ledger:
    """This rank's file. A step whose line is missing on any rank does not count."""

    def __init__(self, folder: Path, attempt: Attempt) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = _open_after_torn_line(folder / f"rank-{attempt.rank:05d}.jsonl")
        self.begin(attempt)

    def begin(self, attempt: Attempt) -> None:
        """Enter what follows as another attempt: a rollback is one."""
        self._write(asdict(attempt))

    def log(
        self, step: int, microbatches: Iterable[Microbatch], *, loss: float, grad_norm: float
    ) -> None:
        """Enter a finished step: this rank's microbatches, the loss and norm of all ranks."""
        rows = [
            [row, *start.place, *end.place, _crc32(tokens, labels)]
            for batch in microbatches
            for (row, start, end), tokens, labels in zip(
                batch.spans, batch.tokens.numpy(), batch.labels.numpy(), strict=True
            )
        ]
        values = {"loss": loss.hex(), "grad_norm": grad_norm.hex()}
        self._write({"step": step, "rows": rows, **values})

    def sync(self) -> None:
        """Make what is logged survive a power cut, like the checkpoint that is published next."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        # In the kernel's hands it survives a kill of the process.
        self._file.flush()


def _crc32(tokens: np.ndarray, labels: np.ndarray) -> int:
    """Of a row's ``tokens`` and the last of its ``labels``, each (s,) int64."""
    return zlib.crc32(labels[-1:].data, zlib.crc32(tokens.data))


def _open_after_torn_line(path: Path) -> TextIO:
    """Append to ``path``, on a new line: a killed attempt may have left half of one."""
    file = path.open("ab+")
    if file.tell() > 0:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return TextIOWrapper(file, encoding="ascii")
