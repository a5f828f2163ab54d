"""What fails on one rank fails on all, at once, and says where."""

from collections.abc import Callable

import pytest
import torch.distributed as dist

from config import ConfigError
from runtime.together import RankFailure, everywhere, gather, on_first, raise_everywhere
from tests.ranks import RankPool


def on_rank(rank: int, error: Exception) -> Callable[[], int]:
    def act() -> int:
        if dist.get_rank() == rank:
            raise error
        return dist.get_rank()

    return act


def answers() -> tuple[int, list[int], list[int]]:
    return on_first(lambda: dist.get_rank() + 7), gather(dist.get_rank), everywhere(dist.get_rank())


def test_what_succeeds_is_told(ranks: RankPool) -> None:
    whole = [0, 1, 2]
    assert ranks.run(answers, 3) == [(7, whole, whole), (7, [], whole), (7, [], whole)]


def failures() -> list[str]:
    found = []
    disk = OSError("disk on fire")
    for act in (
        lambda: on_first(on_rank(0, disk)),
        lambda: gather(on_rank(1, disk)),
        lambda: raise_everywhere(disk if dist.get_rank() == 1 else None, is_mistake=False),
    ):
        with pytest.raises(RankFailure) as raised:
            act()
        found.append(str(raised.value))
    mistake = ValueError("data: line 3") if dist.get_rank() == 1 else None
    with pytest.raises(ConfigError) as refused:
        raise_everywhere(mistake, is_mistake=True)
    return [*found, str(refused.value)]


def test_what_fails_is_told_to_all(ranks: RankPool) -> None:
    burnt = "OSError: disk on fire"
    mistake = "rank 1: ValueError: data: line 3"
    want = [f"rank 0: {burnt}", f"rank 1: {burnt}", f"rank 1: {burnt}", mistake]
    assert ranks.run(failures, 2) == [want, want]
