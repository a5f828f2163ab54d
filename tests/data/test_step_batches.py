"""All ranks agree on the counts of a step, whether they share rows or not."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist

from config import ConfigError
from data.loader import Microbatch, MicrobatchLoader
from data.step_batches import DataError, StepBatch, StepBatches, StepSync
from runtime.labels import IGNORE_INDEX
from tests.lib.control import control_of
from tests.lib.ranks import RankPool

GLOBAL_BATCH = 4


class FakeLoader:
    """Fake loader: microbatches with the given numbers of target tokens."""

    def __init__(self, n_valid: list[int], *, microbatches: int, n_bad: int) -> None:
        self.n_microbatches, self.n_bad, self._left = microbatches, n_bad, iter(n_valid)

    def __iter__(self) -> Iterator[Microbatch]:
        return self

    def __next__(self) -> Microbatch:
        labels = torch.full((1, 8), IGNORE_INDEX)
        labels[:, : next(self._left)] = 1
        return Microbatch(labels, labels)


def take(
    folder: Path,
    n_valid: list[list[int]],
    n_bad: list[int],
    *,
    sizes: list[int],
    n_readers: int,
    max_bad_records: int = 9,
) -> list[tuple[StepBatch, StepSync]] | str:
    """Return the batches and syncs of steps of ``sizes``, or the text of a ``DataError``.

    ``n_valid``, ``n_bad``: target tokens and bad records of each rank.
    """
    rank, dp_degree = dist.get_rank(), dist.get_world_size() // n_readers
    loader = FakeLoader(n_valid[rank], microbatches=GLOBAL_BATCH // dp_degree, n_bad=n_bad[rank])
    with control_of(folder) as control:
        batches = StepBatches(
            cast(MicrobatchLoader, loader),
            control,
            batch_size=lambda step: sizes[step - 1],
            global_batch_size=GLOBAL_BATCH,
            n_readers=n_readers,
            max_bad_records=max_bad_records,
        )
        try:
            return [batches.next(step, is_writing=rank == 1) for step in range(1, len(sizes) + 1)]
        except DataError as error:
            return str(error) if isinstance(error.cause, ConfigError) else "RankFailure"


def test_counts_are_summed_over_ranks_with_different_rows(ranks: RankPool, tmp_path: Path) -> None:
    n_valid = [[8, 3, 5], [1, 0, 2]]
    found = ranks.run(partial(take, sizes=[2, 4], n_readers=1), 2, tmp_path, n_valid, [2, 1])
    for own in found:
        assert [len(batch.microbatches) for batch, _ in own] == [1, 2]
        assert [batch.n_sequences for batch, _ in own] == [2, 4]
        assert [batch.n_tokens for batch, _ in own] == [8 + 1, 3 + 0 + 5 + 2]
        assert [sync.n_bad_records for _, sync in own] == [2 + 1] * 2
        assert [sync.n_writing for _, sync in own] == [1, 1]


def test_counts_of_shared_rows_are_not_summed(ranks: RankPool, tmp_path: Path) -> None:
    n_valid = [[8, 3, 5, 1]] * 2
    found = ranks.run(partial(take, sizes=[4], n_readers=2), 2, tmp_path, n_valid, [3, 3])
    for ((batch, sync),) in found:
        assert (len(batch.microbatches), batch.n_tokens, sync.n_bad_records) == (4, 17, 3)


@pytest.mark.parametrize(("n_readers", "n_bad"), [(1, [2, 1]), (2, [3, 3])])
def test_too_many_bad_records_raise_on_all_ranks(
    ranks: RankPool, tmp_path: Path, n_readers: int, n_bad: list[int]
) -> None:
    for most, is_over in ((3, False), (2, True)):
        read = partial(take, sizes=[4], n_readers=n_readers, max_bad_records=most)
        found = ranks.run(read, 2, tmp_path, [[1] * 4] * 2, n_bad)
        text = "data.max_bad_records: 3 records could not be read"
        assert all(own == text if is_over else isinstance(own, list) for own in found)


def test_rows_without_tokens_are_skipped_until_a_global_batch_has_none(
    ranks: RankPool, tmp_path: Path
) -> None:
    """A step of a ramp has only some rows; the others may still have documents."""
    n_valid = [[0, 2, 0, 3, 0, 0], [0] * 6]
    found = ranks.run(partial(take, sizes=[2, 2, 2], n_readers=1), 2, tmp_path, n_valid, [0, 0])
    for own in found:
        assert [batch.n_tokens for batch, _ in own] == [2, 3, 0]
        assert [len(batch.taken) for batch, _ in own] == [2, 2, 2]
        assert [batch.is_end_of_data for batch, _ in own] == [False, False, True]
