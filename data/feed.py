"""What each step trains on: this rank's microbatches, and what ranks must first agree on."""

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
    """Counts are of all ranks together, and equal on all of them."""

    microbatches: list[Batch]
    """This rank's."""
    waited: float
    """Seconds that this rank waited for them."""
    n_rows: int
    n_tokens: int
    """Labels that count, by which the loss is divided."""
    n_bad_records: int
    """Records of the run so far that could not be read."""
    has_ended: bool
    """Whether this step and those before it, back to a whole global batch, had no data."""
    n_writing: int
    """Ranks that are still writing a checkpoint."""


class Feed:
    """Takes each step's microbatches from ``loader``, as many as the step's batch size needs.

    ``batch_size``: rows of a step, fewer than ``global_batch_size`` during a ramp.
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
        """What ``step`` trains on, not committed yet.

        ``is_writing``: whether this rank is writing a checkpoint. One reduction carries all that
        ranks must agree on, requests to stop included. Raises as ``take_together`` does, and
        ``ConfigError`` after too many bad records. A collective.
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
        # A small batch takes only some of the rows, and the others may still have data.
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
    """The next microbatches, the seconds this rank waited for them, and sums over all ranks.

    The sums: ``tokens``, labels that count; ``bad``, records so far that could not be read;
    ``writing``, ranks that are writing a checkpoint. What is wrong on one rank, with the data
    (``ConfigError``) or with reading (``RankFailure``), is raised on all. A collective.
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
