"""The verdict names who died, who hangs and who failed first, from what ranks said and left."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from runtime import post_mortem
from runtime.post_mortem import (
    ALARM,
    MOST_NAMED,
    PREFIX,
    ROOT,
    Verdict,
    Witness,
    Words,
    _place,
    judge,
)

TIMEOUT = "RuntimeError: Timed out waiting 5000ms for recv operation to complete"


def words(rank: int, *, step: int = 12, place: str = "train.py:1", order: int = 0) -> Words:
    error, trace = (TIMEOUT, f"Traceback of rank {rank}\n") if order else ("", "")
    return Words(rank, "host", "12:00:00", step, place, error, trace, order)


def verdict(
    world_size: int,
    codes: Mapping[int, int | None],
    *,
    said: list[Words],
    heard: list[Words] | None = None,
) -> Verdict:
    store = dist.HashStore()
    told = dist.PrefixStore(PREFIX, store)
    for key, all_words in (("words", said), ("heard", heard or [])):
        for spoken in all_words:
            told.set(f"{key}/{spoken.rank}", json.dumps(asdict(spoken)))
    result = judge(store, world_size, lambda: codes)
    assert told.check([ALARM])
    return result


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(post_mortem, "PATIENCE_SECONDS", 0.05)


def test_a_killed_rank_is_the_cause_and_its_peers_errors_are_not() -> None:
    codes = {0: 1, 1: 1, 2: -9}
    told = verdict(3, codes, said=[words(0, order=2), words(1, order=1)], heard=[words(2)])
    assert told.lines[0] == "rank 2 (host) was ended by SIGKILL"
    assert told.lines[1].startswith("rank 1 (host) failed in step 12 at train.py:1: RuntimeError")
    assert len(told.lines) == 2
    assert (told.traceback, told.silent) == ("", [])


def test_a_rank_that_does_not_answer_is_named_with_where_it_was() -> None:
    codes = {0: 1, 1: None}
    told = verdict(2, codes, said=[words(0, order=1)], heard=[words(0), words(1, step=11)])
    where = "last heard at 12:00:00 in step 11 at train.py:1"
    assert told.lines[0] == f"rank 1 (host) did not answer; {where}"
    assert told.silent == [1]
    assert told.traceback == "Traceback of rank 0\n"


def test_of_another_nodes_ranks_only_words_are_known() -> None:
    told = verdict(4, {0: 1, 1: 1}, said=[words(0, order=1), words(1, order=2), words(2)])
    assert told.lines[0] == "rank 3 did not answer, and was never heard of"
    assert told.silent == [3]


def test_a_rank_whose_main_thread_hangs_stands_out_by_its_place() -> None:
    answers = [words(rank) for rank in (1, 3)]
    behind = words(2, step=11, place="data/loader.py:80")
    told = verdict(4, {0: 1}, said=[words(0, order=1), *answers, behind])
    assert told.lines[1:] == [
        "rank 1 (host) and 1 more: in step 12 at train.py:1",
        "rank 2 (host): in step 11 at data/loader.py:80",
    ]


def test_ranks_that_are_aborted_for_waiting_come_after_the_one_they_waited_for() -> None:
    told = verdict(3, {0: -6, 1: None, 2: -6}, said=[], heard=[words(r) for r in range(3)])
    assert told.lines[0].startswith("rank 1 (host) did not answer")
    assert told.lines[1:] == [f"rank {r} (host) was ended by SIGABRT" for r in (0, 2)]


def test_a_code_without_a_word_is_told() -> None:
    assert verdict(1, {0: 1}, said=[]).lines == ["rank 0 exited with 1"]
    assert verdict(1, {0: -40}, said=[]).lines == ["rank 0 was ended by 40"]
    told = verdict(2, {0: 0, 1: 1}, said=[words(0), words(1)])
    where = "in step 12 at train.py:1"
    assert told.lines == ["rank 1 (host) exited with 1", f"rank 0 (host) and 1 more: {where}"]


def test_the_first_of_many_are_named() -> None:
    told = verdict(1000, {}, said=[words(0, order=1)])
    assert len(told.lines) == MOST_NAMED + 1
    assert told.lines[-1] == f"and {1000 - MOST_NAMED} more"
    assert len(verdict(MOST_NAMED, {}, said=[words(0, order=1)]).lines) == MOST_NAMED


def test_alone_nothing_happens() -> None:
    with pytest.raises(RuntimeError, match="mine"), Witness({}):
        raise RuntimeError("mine")


def test_a_place_is_the_innermost_line_of_ours() -> None:
    paths = [
        ROOT / ".venv/lib/site-packages/torch/x.py",
        ROOT / "data/loader.py",
        ROOT / "train.py",
    ]
    frames = [SimpleNamespace(f_code=SimpleNamespace(co_filename=str(path))) for path in paths]
    lines = cast(Any, list(zip(frames, (7, 8, 9), strict=True)))
    assert _place(lines) == "data/loader.py:8"
    assert _place(lines[:1]) == "an unknown place"


def test_where_a_rank_is_costs_next_to_nothing() -> None:
    witness = Witness({})
    begin = time.perf_counter()
    for _ in range(100):
        place = witness._here().place
    # Twelve times a minute.
    assert (time.perf_counter() - begin) / 100 < 0.02
    assert place.startswith("tests/runtime/test_post_mortem.py:")
