"""What each step trains on: this rank's microbatches, and what ranks must agree on before it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from config import ConfigError
from data.loader import Batch, BatchLoader
from runtime.control import RunControl
from runtime.labels import IGNORED
from runtime.together import raise_everywhere


@dataclass(frozen=True)
class StepData:
    """This rank's ``microbatches``; what else is counted is equal on all ranks, and of them all."""

    microbatches: list[Batch]
    waited: float
    """Seconds, of this rank."""
    n_rows: int
    n_tokens: int
    """Labels that count, by which the loss is divided."""
    n_bad_records: int
    """Of the run so far."""
    has_ended: bool
    """Whether there is nothing in it, nor in the steps before it, for a whole global batch."""
    counts: dict[str, int]


class Feed:
    """Takes steps' microbatches from ``loader``, as many as their batch size is.

    ``batch_size`` of a step; those of ``n_rows`` are whole ones. ``n_readers``: how many ranks read
    the same rows.
    """

    def __init__(
        self,
        loader: BatchLoader,
        control: RunControl,
        *,
        batch_size: Callable[[int], int],
        n_rows: int,
        n_readers: int,
        max_bad_records: int,
    ) -> None:
        self._loader, self._control = loader, control
        self._batch_size, self._n_rows, self._n_readers = batch_size, n_rows, n_readers
        self._max_bad_records = max_bad_records
        self._n_empty = 0

    def take(self, step: int, **counts: int) -> StepData:
        """What ``step`` trains on; nothing is committed. Ranks' ``counts`` are summed on the way.

        All that ranks must agree on, requests to stop among it, is in one reduction. Raises as
        ``take_together`` does, and ``ConfigError`` after too many bad records. A collective.
        """
        n_rows = self._batch_size(step)
        count = self._loader.microbatches * n_rows // self._n_rows
        microbatches, waited, agreed = take_together(self._loader, count, self._control, **counts)
        n_bad = agreed["bad"] // self._n_readers
        if n_bad > self._max_bad_records:
            raise ConfigError([f"data.max_bad_records: {n_bad} records could not be read"])
        n_tokens = agreed["tokens"] // self._n_readers
        # Beside the rows of a small batch there are others, which may go on.
        self._n_empty = self._n_empty + n_rows if n_tokens == 0 else 0
        has_ended = self._n_empty >= self._n_rows
        summed = {name: agreed[name] for name in counts}
        return StepData(microbatches, waited, n_rows, n_tokens, n_bad, has_ended, summed)


def take_together(
    loader: BatchLoader, count: int, control: RunControl, **counts: int
) -> tuple[list[Batch], float, dict[str, int]]:
    """The next microbatches, the seconds this rank waited for them, and what ranks tell each other.

    That is the sums over all ranks of ``counts``, of ``tokens``, the labels that count, and of
    ``bad`` records so far. What is wrong on one rank, with the data (``ConfigError``) or with
    reading, is raised on all. A collective.
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
        **counts,
    )
    if agreed["unread"]:
        raise_everywhere(problem, is_mistake=agreed["mistakes"] > 0)
    return microbatches, waited, agreed


def count_valid(microbatches: list[Batch]) -> int:
    """Labels of this rank's rows that count."""
    return sum(int((batch.labels != IGNORED).sum()) for batch in microbatches)
