"""An error on one rank raises on all ranks and names the rank; so do facts that differ."""

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from unittest.mock import patch

import pytest
import torch.distributed as dist

from config import ConfigError
from runtime.compat import set_timeout
from runtime.object_collectives import (
    MAX_DIFFERENCES,
    RankFailure,
    all_gather_object,
    call_beyond_timeout,
    gather_to_rank0,
    raise_if_unequal,
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
    found.append(str(config_error.value))
    with pytest.raises(ConfigError) as config_error:
        run_on_rank0(raise_on_rank(0, ConfigError(["a: wrong", "b: wrong"])))
    return found + config_error.value.messages


def test_errors_raise_on_all_ranks(ranks: RankPool) -> None:
    failure = "OSError: disk on fire"
    mistake = "rank 1: ValueError: data: line 3"
    want = [f"rank 0: {failure}", f"rank 1: {failure}", f"rank 1: {failure}", mistake]
    want += ["a: wrong", "b: wrong"]
    assert ranks.run(failures, 2) == [want, want]


def outlast_the_timeout() -> int:
    def slow() -> int:
        if dist.get_rank() == 1:
            time.sleep(2.5)
        return dist.get_rank()

    failing = raise_on_rank(1, ValueError("wrong"))
    set_timeout(timedelta(seconds=1))
    with patch("runtime.object_collectives.MEET_SECONDS", 0.1):
        with pytest.raises(RankFailure, match="rank 1: ValueError: wrong"):
            gather_to_rank0(partial(call_beyond_timeout, failing))
        return call_beyond_timeout(slow)


def test_slow_call_of_one_rank_outlasts_the_timeout_of_the_others(ranks: RankPool) -> None:
    assert ranks.run(outlast_the_timeout, 2) == [0, 1]


def error_of(facts: list[dict[str, str]], mistakes: list[str]) -> list[str]:
    rank = dist.get_rank()
    try:
        raise_if_unequal(facts[rank], mistakes[rank])
    except ConfigError as error:
        return error.messages
    return []


def test_unequal_facts_are_named_with_values_ranks_and_hosts(ranks: RankPool) -> None:
    host = socket.gethostname()
    no_mistakes = [""] * 3
    one = {"optimizer.lr": "0.1", "Python": "3.11"}
    assert ranks.run(error_of, 3, [one] * 3, no_mistakes) == [[]] * 3
    # The order of facts is no difference.
    assert ranks.run(error_of, 2, [one, dict(reversed(one.items()))], no_mistakes) == [[]] * 2
    other, lacking = one | {"optimizer.lr": "0.5"}, {"optimizer.lr": "0.1"}
    assert (
        ranks.run(error_of, 3, [one, other, lacking], no_mistakes)
        == [
            [
                "optimizer.lr must be equal on all ranks:"
                f" 0.1 on rank 0 ({host}) and 1 more, 0.5 on rank 1 ({host})",
                "Python must be equal on all ranks:"
                f" 3.11 on rank 0 ({host}) and 1 more, absent on rank 2 ({host})",
            ]
        ]
        * 3
    )
    many = [{f"file {i}": str(rank) for i in range(MAX_DIFFERENCES + 5)} for rank in range(2)]
    for messages in ranks.run(error_of, 2, many, no_mistakes):
        assert len(messages) == MAX_DIFFERENCES + 1
        assert messages[-1] == "and 5 more"


def test_mistake_of_one_rank_is_raised_on_all(ranks: RankPool) -> None:
    facts = [{"optimizer.lr": "0.1"}, {}, {}]
    mistake = "data.path: no files"
    host = socket.gethostname()
    assert (
        ranks.run(error_of, 3, facts, ["", mistake, mistake])
        == [[f"rank 1 ({host}) and 1 more: {mistake}"]] * 3
    )
    # Once, not for each rank.
    assert ranks.run(error_of, 3, facts, [mistake] * 3) == [[mistake]] * 3
