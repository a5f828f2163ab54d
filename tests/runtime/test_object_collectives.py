"""An error on one rank raises on all ranks and names the rank."""

from collections.abc import Callable

import pytest
import torch.distributed as dist

from config import ConfigError
from runtime.object_collectives import (
    RankFailure,
    all_gather_object,
    gather_to_rank0,
    raise_on_all_ranks,
    run_on_rank0,
)
from tests.lib.ranks import RankPool


def raise_on_rank(rank: int, error: Exception) -> Callable[[], int]:
    def function() -> int:
        if dist.get_rank() == rank:
            raise error
        return dist.get_rank()

    return function


def results() -> tuple[int, list[int], list[int]]:
    return (
        run_on_rank0(lambda: dist.get_rank() + 7),
        gather_to_rank0(dist.get_rank),
        all_gather_object(dist.get_rank()),
    )


def test_results_reach_their_ranks(ranks: RankPool) -> None:
    everyone = [0, 1, 2]
    assert ranks.run(results, 3) == [(7, everyone, everyone), (7, [], everyone), (7, [], everyone)]


def failures() -> list[str]:
    found = []
    disk = OSError("disk on fire")
    for function in (
        lambda: run_on_rank0(raise_on_rank(0, disk)),
        lambda: gather_to_rank0(raise_on_rank(1, disk)),
        lambda: raise_on_all_ranks(disk if dist.get_rank() == 1 else None, is_mistake=False),
    ):
        with pytest.raises(RankFailure) as raised:
            function()
        found.append(str(raised.value))
    mistake = ValueError("data: line 3") if dist.get_rank() == 1 else None
    with pytest.raises(ConfigError) as config_error:
        raise_on_all_ranks(mistake, is_mistake=True)
    return [*found, str(config_error.value)]


def test_errors_raise_on_all_ranks(ranks: RankPool) -> None:
    failure = "OSError: disk on fire"
    mistake = "rank 1: ValueError: data: line 3"
    want = [f"rank 0: {failure}", f"rank 1: {failure}", f"rank 1: {failure}", mistake]
    assert ranks.run(failures, 2) == [want, want]
