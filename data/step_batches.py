"""The batch of each step: this rank's microbatches, and what all ranks must agree on first."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from torch.profiler import record_function

from config import ConfigError
from data.loader import Microbatch, MicrobatchLoader, num_target_tokens
from runtime.control import RunControl
from runtime.object_collectives import RankFailure, raise_on_all_ranks


class DataError(Exception):
    """Data cannot be read. Raised on all ranks at once, so that they can still save.

    ``cause``: ``ConfigError`` for bad data, ``RankFailure`` for a failed read.
    """

    def __init__(self, cause: ConfigError | RankFailure) -> None:
        super().__init__(str(cause))
        self.cause = cause


@dataclass(frozen=True)
class StepBatch:
    """The batch of a step, which is not committed yet."""

    microbatches: list[Microbatch]
    """This rank's."""
    data_wait: float
    """Seconds that this rank waited for them."""
    n_sequences: int
    """Sequences of the step on all ranks together."""
    n_tokens: int
    """Target tokens of the step on all ranks together, by which the loss is divided."""
    is_end_of_data: bool
    """The next ``global_batch_size`` rows have no target tokens: the data have ended."""
    skipped: list[Microbatch] = field(default_factory=list)
    """This rank's microbatches before them, without target tokens on any rank: the step goes past
    them."""

    @property
    def taken(self) -> list[Microbatch]:
        """All that the step takes of this rank's data."""
        return [*self.skipped, *self.microbatches]

    @property
    def n_empty_rows(self) -> int:
        """Rows of ``skipped`` on all ranks together."""
        return len(self.skipped) // len(self.microbatches) * self.n_sequences


@dataclass(frozen=True)
class StepSync:
    """Results of the one all-reduce that begins a step, equal on all ranks."""

    n_bad_records: int
    """Records of the run so far that could not be read."""
    n_writing: int
    """Ranks that are still writing a checkpoint."""
    stop: str | None
    """Reason to stop: a signal's name or the stop file; None to go on."""
    wanted: frozenset[str]
    """Profiles that were requested: ``runtime.control.TRACE`` or ``SNAPSHOT``."""


class StepBatches:
    """Takes each step's microbatches from ``loader``, as many as the step's batch size needs.

    ``batch_size``: rows of a step, fewer than ``global_batch_size`` during a ramp.
    ``n_readers``: number of ranks that read the same rows.
    """

    def __init__(
        self,
        loader: MicrobatchLoader,
        control: RunControl,
        *,
        batch_size: Callable[[int], int],
        global_batch_size: int,
        n_readers: int,
        max_bad_records: int,
    ) -> None:
        self.loader, self._control = loader, control
        self._batch_size, self._global_batch_size = batch_size, global_batch_size
        self._n_readers, self._max_bad_records = n_readers, max_bad_records

    def next(self, step: int, *, is_writing: bool) -> tuple[StepBatch, StepSync]:
        """Return the batch of ``step`` and what ranks agreed on. Collective.

        Rows without target tokens are skipped: without a gradient, a step would decay weights.
        ``is_writing``: this rank is still writing a checkpoint. Raises as ``next_microbatches``
        does, and ``DataError`` after more than ``max_bad_records``.
        """
        n_sequences = self._batch_size(step)
        count = self.loader.n_microbatches * n_sequences // self._global_batch_size
        data_wait, n_rows, skipped = 0.0, 0, list[Microbatch]()
        while True:
            microbatches, seconds, sums = next_microbatches(
                self.loader, count, self._control, is_writing=is_writing
            )
            data_wait += seconds
            n_bad = sums["bad"] // self._n_readers
            if n_bad > self._max_bad_records:
                text = f"data.max_bad_records: {n_bad} records could not be read"
                raise DataError(ConfigError([text]))
            n_tokens = sums["tokens"] // self._n_readers
            n_rows += n_sequences
            is_end = n_tokens == 0 and n_rows >= self._global_batch_size
            if n_tokens > 0 or is_end:
                break
            # A small batch takes only some of the rows, and the others may still have data.
            skipped += microbatches
        return (
            StepBatch(
                microbatches,
                data_wait,
                n_sequences,
                n_tokens,
                is_end_of_data=is_end,
                skipped=skipped,
            ),
            StepSync(
                n_bad_records=n_bad,
                n_writing=sums["writing"],
                stop=self._control.stop,
                wanted=self._control.take_wanted(),
            ),
        )


def next_microbatches(
    loader: MicrobatchLoader, count: int, control: RunControl, *, is_writing: bool = False
) -> tuple[list[Microbatch], float, dict[str, int]]:
    """Return the next microbatches, the seconds this rank waited, and sums over all ranks.

    The sums: ``tokens``, target tokens, and ``bad``, unreadable records so far, each counted by
    every rank that reads its row; ``writing``, ranks that are writing a checkpoint. Collective.
    Raises ``DataError`` if one rank cannot read.
    """
    begin, microbatches, problem = time.perf_counter(), [], None
    try:
        with record_function("data wait"):
            microbatches = list(islice(loader, count))
    except (ValueError, OSError) as error:
        problem = error
    data_wait = time.perf_counter() - begin
    with record_function("step sync"):
        sums = control.all_reduce_counts(
            tokens=num_target_tokens(microbatches),
            unread=int(problem is not None),
            mistakes=int(isinstance(problem, ValueError)),
            bad=loader.n_bad,
            writing=int(is_writing),
        )
    if sums["unread"]:
        try:
            raise_on_all_ranks(problem, is_mistake=sums["mistakes"] > 0)
        except (ConfigError, RankFailure) as error:
            raise DataError(error) from error
    return microbatches, data_wait, sums
