"""What each step trains on: this rank's microbatches, and what ranks must agree on before it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from config import ConfigError
from data.loader import Batch, BatchLoader, count_valid
from runtime.control import RunControl
from runtime.together import raise_everywhere


@dataclass(frozen=True)
class StepData:
    """What is counted is of all ranks together, and equal on them."""

    microbatches: list[Batch]
    """Of this rank."""
    waited: float
    """Seconds, of this rank, for them."""
    n_rows: int
    n_tokens: int
    """Labels that count, by which the loss is divided."""
    n_bad_records: int
    """Of the run so far."""
    has_ended: bool
    """Whether there is nothing in it, nor in the steps before it, for a whole global batch."""
    n_writing: int
    """Ranks that still write a checkpoint."""


class Feed:
    """Takes steps' microbatches from ``loader``, as many as their batch size is.

    ``batch_size`` of a step; on the way up to ``global_batch_size`` it is part of that.
    ``n_readers``: how many ranks read the same rows.
    """

    def __init__(
        self,
        loader: BatchLoader,
        control: RunControl,
        *,
        batch_size: Callable[[int], int],
        global_batch_size: int,
        n_readers: int,
        max_bad_records: int,
    ) -> None:
        self._loader, self._control = loader, control
        self._batch_size, self._global_batch_size = batch_size, global_batch_size
        self._n_readers, self._max_bad_records = n_readers, max_bad_records
        self._n_empty = 0

    def take(self, step: int, *, is_writing: bool) -> StepData:
        """What ``step`` trains on; nothing is committed. ``is_writing``: a checkpoint, this rank.

        All that ranks must agree on, requests to stop among it, is in one reduction. Raises as
        ``take_together`` does, and ``ConfigError`` after too many bad records. A collective.
        """
        n_rows = self._batch_size(step)
        count = self._loader.microbatches * n_rows // self._global_batch_size
        microbatches, waited, agreed = take_together(
            self._loader, count, self._control, is_writing=is_writing
        )
        n_bad = agreed["bad"] // self._n_readers
        if n_bad > self._max_bad_records:
            raise ConfigError([f"data.max_bad_records: {n_bad} records could not be read"])
        n_tokens = agreed["tokens"] // self._n_readers
        # Beside the rows of a small batch there are others, which may go on.
        self._n_empty = self._n_empty + n_rows if n_tokens == 0 else 0
        return StepData(
            microbatches,
            waited,
            n_rows,
            n_tokens,
            n_bad_records=n_bad,
            has_ended=self._n_empty >= self._global_batch_size,
            n_writing=agreed["writing"],
        )


def take_together(
    loader: BatchLoader, count: int, control: RunControl, *, is_writing: bool = False
) -> tuple[list[Batch], float, dict[str, int]]:
    """The next microbatches, the seconds this rank waited for them, and what ranks tell each other.

    That is the sums over all ranks of ``tokens``, the labels that count, of ``bad`` records so far,
    and of those ``writing`` a checkpoint. What is wrong on one rank, with the data
    (``ConfigError``) or with reading, is raised on all. A collective.
    """
    begin, microbatches, problem = time.perf_counter(), [], None
    try:
        microbatches = list(islice(loader, count))
    except (ValueError, OSError) as error:
        problem = error
    waited = time.perf_counter() - begin
    agreed = control.agree(
        tokens=count_valid(microbatches),
        unread=int(problem is not None),
        mistakes=int(isinstance(problem, ValueError)),
        bad=loader.n_bad,
        writing=int(is_writing),
    )
    if agreed["unread"]:
        raise_everywhere(problem, is_mistake=agreed["mistakes"] > 0)
    return microbatches, waited, agreed
