"""Ranks agree on what a step trains on, whether they read the same rows or their own."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist

from config import ConfigError
from data.feed import Feed, StepData
from data.loader import Batch, BatchLoader
from runtime.control import SIGNALS, RunControl
from runtime.labels import IGNORED
from tests.ranks import RankPool

GLOBAL_BATCH = 4


class Rows:
    """In the place of a loader: microbatches with so many labels that count."""

    def __init__(self, n_valid: list[int], *, microbatches: int, n_bad: int) -> None:
        self.microbatches, self.n_bad, self._left = microbatches, n_bad, iter(n_valid)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        labels = torch.full((1, 8), IGNORED)
        labels[:, : next(self._left)] = 1
        return Batch(labels, labels)


@contextmanager
def control_of(folder: Path) -> Iterator[RunControl]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        control = RunControl(folder)
        control.hold()
        yield control
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def take(
    folder: Path,
    n_valid: list[list[int]],
    n_bad: list[int],
    *,
    sizes: list[int],
    n_readers: int,
    max_bad_records: int = 9,
) -> list[StepData] | str:
    """What this rank is given for steps of ``sizes``, or the mistake that it is told.

    ``n_valid`` and ``n_bad``: of each rank.
    """
    rank, places = dist.get_rank(), dist.get_world_size() // n_readers
    rows = Rows(n_valid[rank], microbatches=GLOBAL_BATCH // places, n_bad=n_bad[rank])
    with control_of(folder) as control:
        feed = Feed(
            cast(BatchLoader, rows),
            control,
            batch_size=lambda step: sizes[step - 1],
            global_batch_size=GLOBAL_BATCH,
            n_readers=n_readers,
            max_bad_records=max_bad_records,
        )
        try:
            return [feed.take(step, is_writing=rank == 1) for step in range(1, len(sizes) + 1)]
        except ConfigError as error:
            return str(error)


def test_ranks_with_rows_of_their_own_add_them_up(ranks: RankPool, tmp_path: Path) -> None:
    n_valid = [[8, 3, 5], [1, 0, 2]]
    found = ranks.run(partial(take, sizes=[2, 4], n_readers=1), 2, tmp_path, n_valid, [2, 1])
    for own in found:
        small, whole = own
        assert [len(step.microbatches) for step in own] == [1, 2]
        assert [step.n_rows for step in own] == [2, 4]
        assert (small.n_tokens, whole.n_tokens) == (8 + 1, 3 + 0 + 5 + 2)
        assert small.n_bad_records == whole.n_bad_records == 2 + 1
        assert small.n_writing == whole.n_writing == 1


def test_ranks_that_read_the_same_rows_count_them_once(ranks: RankPool, tmp_path: Path) -> None:
    n_valid = [[8, 3, 5, 1]] * 2
    found = ranks.run(partial(take, sizes=[4], n_readers=2), 2, tmp_path, n_valid, [3, 3])
    for (step,) in found:
        assert (len(step.microbatches), step.n_tokens, step.n_bad_records) == (4, 17, 3)


@pytest.mark.parametrize(("n_readers", "n_bad"), [(1, [2, 1]), (2, [3, 3])])
def test_too_many_bad_records_are_one_mistake_on_every_rank(
    ranks: RankPool, tmp_path: Path, n_readers: int, n_bad: list[int]
) -> None:
    for most, is_over in ((3, False), (2, True)):
        feed = partial(take, sizes=[4], n_readers=n_readers, max_bad_records=most)
        found = ranks.run(feed, 2, tmp_path, [[1] * 4] * 2, n_bad)
        text = "data.max_bad_records: 3 records could not be read"
        assert all(own == text if is_over else isinstance(own, list) for own in found)


def test_the_end_is_a_global_batch_of_nothing(ranks: RankPool, tmp_path: Path) -> None:
    """One step of a ramp has some of its rows; the others may go on."""
    n_valid = [[0, 2, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]]
    found = ranks.run(
        partial(take, sizes=[2, 2, 2, 2, 4], n_readers=1), 2, tmp_path, n_valid, [0, 0]
    )
    for own in found:
        assert [step.has_ended for step in own] == [False, False, False, True, True]
