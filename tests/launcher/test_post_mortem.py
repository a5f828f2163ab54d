"""The failure report names ranks that died, hang or failed first, from reports and heartbeats."""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch.distributed as dist

from launcher import post_mortem
from launcher.post_mortem import (
    ABORT,
    DISTRIBUTED,
    MAX_LINES,
    PREFIX,
    ROOT,
    TORCH,
    FailureReport,
    RankHeartbeat,
    RankReport,
    _collective,
    _place,
    diagnose,
    silent_ranks,
)

TIMEOUT = "RuntimeError: Timed out waiting 5000ms for recv operation to complete"
CUDA_ERROR = "AcceleratorError: CUDA error: an illegal memory access was encountered"


def report(rank: int, *, step: int = 12, place: str = "train.py:1", order: int = 0) -> RankReport:
    error, trace = (TIMEOUT, f"Traceback of rank {rank}\n") if order else ("", "")
    return RankReport(rank, "host", "12:00:00", step, place, error, trace, order)


def failure_report(
    world_size: int,
    codes: Mapping[int, int | None],
    *,
    reports: list[RankReport],
    heartbeats: list[RankReport] | None = None,
) -> FailureReport:
    store = dist.HashStore()
    ranks_store = dist.PrefixStore(PREFIX, store)
    for key, states in (("report", reports), ("heartbeat", heartbeats or [])):
        for state in states:
            ranks_store.set(f"{key}/{state.rank}", json.dumps(asdict(state)))
    result = diagnose(store, world_size, lambda: codes)
    assert ranks_store.check([ABORT])
    return result


@pytest.fixture(autouse=True)
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(post_mortem, "REPORT_TIMEOUT_SECONDS", 0.05)


def test_killed_rank_is_the_cause_before_errors_of_others() -> None:
    codes = {0: 1, 1: 1, 2: -9}
    found = failure_report(
        3, codes, reports=[report(0, order=2), report(1, order=1)], heartbeats=[report(2)]
    )
    assert found.lines[0] == "rank 2 (host) was killed by SIGKILL"
    assert found.lines[1].startswith("rank 1 (host) failed in step 12 at train.py:1: RuntimeError")
    assert len(found.lines) == 2
    assert (found.traceback, found.silent) == ("", [])


@pytest.mark.parametrize("error", [
    "RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:22714.",
    "RuntimeError: [/gloo/transport/tcp/pair.cc:152] timed out connecting: Connection refused",
    "DistBackendError: NCCL error in: NCCLUtils.cpp:77, remote process exited",
    "DistNetworkError: failed to recv, got 0 bytes",
    "RankFailure: rank 1: RuntimeError: Socket Timeout",
])  # fmt: skip
def test_error_of_a_lost_peer_follows_the_killed_rank(error: str) -> None:
    lost = replace(report(0, order=1), error=error)
    found = failure_report(2, {0: 1, 1: -9}, reports=[lost], heartbeats=[report(1)])
    assert found.lines[0] == "rank 1 (host) was killed by SIGKILL"
    assert found.traceback == ""
    failed = replace(lost, error=CUDA_ERROR)
    found = failure_report(20, dict.fromkeys(range(1, 20), -9), reports=[failed])
    assert found.lines[0] == f"rank 0 (host) failed in step 12 at train.py:1: {CUDA_ERROR}"
    assert found.traceback == "Traceback of rank 0\n"


class CountingStore:
    def __init__(self) -> None:
        self._store, self.requests = dist.HashStore(), 0

    def __getattr__(self, name: str) -> Any:
        self.requests += 1
        return getattr(self._store, name)


def test_many_ranks_take_few_requests() -> None:
    """Each of 512 launchers asks the one store."""
    n, dead = 4096, range(800, 808)
    reports = [report(rank) for rank in range(n) if rank not in dead]
    store = CountingStore()
    for each in reports:
        for kind in ("report", "heartbeat"):
            store.set(f"{kind}/{each.rank}", json.dumps(asdict(each)))
    store.requests = 0
    with patch.object(post_mortem.dist, "PrefixStore", lambda prefix, store: store):
        found = diagnose(cast(Any, store), n, lambda: dict.fromkeys(dead, -9))
    assert found.lines[:8] == [f"rank {rank} was killed by SIGKILL" for rank in dead]
    assert store.requests < 300


def test_other_nodes_ask_only_for_their_ranks() -> None:
    store, here = CountingStore(), {8: None, 9: None, 10: -9, 11: 1}
    for rank in (0, 8, 11):
        store.set(f"report/{rank}", json.dumps(asdict(report(rank))))
    asked: list[str] = []
    check = store._store.check
    with (
        patch.object(post_mortem.dist, "PrefixStore", lambda prefix, store: store),
        patch.object(store, "check", lambda keys: asked.extend(keys) or check(keys), create=True),
    ):
        assert silent_ranks(cast(Any, store), 12, [*here], lambda: here) == [9]
        assert store.check([ABORT])
    assert set(asked) == {ABORT, *(f"report/{rank}" for rank in here)}


def test_rank_that_did_not_join_a_collective_is_the_cause() -> None:
    waits = {"place": "optim/grad_norm.py:66", "collective": "all_reduce"}
    reports = [
        replace(report(0, order=1), **waits),
        replace(report(1), place="train_step.py:64"),
        replace(report(2), **waits),
        replace(report(3, order=2), **waits),
    ]
    found = failure_report(4, dict.fromkeys(range(4), 1), reports=reports)
    assert found.lines[0] == (
        "rank 1 (host) did not join the others: in step 12 at train_step.py:64"
    )
    at = "in step 12 at optim/grad_norm.py:66 in all_reduce"
    assert found.lines[1].startswith(f"rank 0 (host) failed {at}: RuntimeError: Timed out")
    assert found.lines[2:] == [f"rank 2 (host): {at}"]


def test_rank_outside_of_collectives_is_not_blamed_for_another_error() -> None:
    failed = replace(report(0, order=1), error="ValueError: bad", collective="all_reduce")
    found = failure_report(2, {0: 1, 1: 1}, reports=[failed, report(1)])
    assert found.lines[1] == "rank 1 (host): in step 12 at train.py:1"


def test_unresponsive_rank_is_named_with_its_position() -> None:
    codes = {0: 1, 1: None}
    found = failure_report(
        2, codes, reports=[report(0, order=1)], heartbeats=[report(0), report(1, step=11)]
    )
    where = "last heartbeat at 12:00:00 in step 11 at train.py:1"
    assert found.lines[0] == f"rank 1 (host) did not answer; {where}"
    assert found.silent == [1]
    assert found.traceback == "Traceback of rank 0\n"


def test_ranks_killed_on_another_node_are_named() -> None:
    """Its launcher says so; without it, as after a crash of the node, they did not answer."""
    store, elsewhere = dist.HashStore(), {2: -9, 3: 1, 4: None}
    ranks_store = dist.PrefixStore(PREFIX, store)
    for each in (report(0), report(3, order=1)):
        ranks_store.set(f"report/{each.rank}", json.dumps(asdict(each)))
    assert silent_ranks(store, 5, [*elsewhere], lambda: elsewhere) == [4]
    found = diagnose(store, 5, lambda: {0: 0, 1: None})
    assert found.lines[0] == "rank 2 was killed by SIGKILL"
    assert found.silent == [1, 4]
    assert not found.is_hang


def test_ranks_of_a_node_without_a_launcher_are_known_by_reports_only() -> None:
    found = failure_report(
        4, {0: 1, 1: 1}, reports=[report(0, order=1), report(1, order=2), report(2)]
    )
    assert found.lines[0] == "rank 3 did not answer; no heartbeat received"
    assert found.silent == [3]


def test_rank_with_hung_main_thread_is_listed_separately() -> None:
    others = [report(rank) for rank in (1, 3)]
    behind = report(2, step=11, place="data/loader.py:80")
    found = failure_report(4, {0: 1}, reports=[report(0, order=1), *others, behind])
    assert found.lines[1:] == [
        "rank 1 (host) and 1 more: in step 12 at train.py:1",
        "rank 2 (host): in step 11 at data/loader.py:80",
    ]


def test_aborted_ranks_follow_the_rank_they_waited_for() -> None:
    found = failure_report(
        3, {0: -6, 1: None, 2: -6}, reports=[], heartbeats=[report(r) for r in range(3)]
    )
    assert found.lines[0].startswith("rank 1 (host) did not answer")
    assert found.lines[1:] == [f"rank {r} (host) was killed by SIGABRT" for r in (0, 2)]


def test_exit_code_without_a_report_is_listed() -> None:
    assert failure_report(1, {0: 1}, reports=[]).lines == ["rank 0 exited with 1"]
    assert failure_report(1, {0: -40}, reports=[]).lines == ["rank 0 was killed by 40"]
    found = failure_report(2, {0: 0, 1: 1}, reports=[report(0), report(1)])
    where = "in step 12 at train.py:1"
    assert found.lines == ["rank 1 (host) exited with 1", f"rank 0 (host) and 1 more: {where}"]


def test_lines_are_limited() -> None:
    def lines(n: int) -> list[str]:
        return failure_report(n, dict.fromkeys(range(1, n), -9), reports=[report(0, order=1)]).lines

    assert len(lines(1000)) == MAX_LINES + 1
    assert lines(1000)[-1] == f"and {1000 - MAX_LINES} more"
    assert len(lines(MAX_LINES)) == MAX_LINES


@pytest.mark.parametrize("error", [CUDA_ERROR, TIMEOUT])
def test_error_is_named_among_many_late_ranks(error: str) -> None:
    reports = [replace(report(30, order=1), error=error), *(report(rank) for rank in range(8))]
    late = [report(rank, step=11) for rank in range(8, 30)]
    found = failure_report(32, {}, reports=reports, heartbeats=late)
    failed = f"rank 30 (host) failed in step 12 at train.py:1: {error}"
    silent = [
        "rank 8 (host) and 21 more did not answer; last heartbeat at 12:00:00 in step 11 at"
        " train.py:1",
        "rank 31 did not answer; no heartbeat received",
    ]
    # A timeout may be the consequence of ranks that hang.
    assert found.lines[:3] == ([*silent, failed] if error == TIMEOUT else [failed, *silent])
    assert found.silent == [*range(8, 30), 31]
    assert found.traceback == "Traceback of rank 30\n"


def test_standalone_rank_raises_its_error() -> None:
    with pytest.raises(RuntimeError, match="mine"), RankHeartbeat({}):
        raise RuntimeError("mine")


def block_that_fails() -> None:
    raise KeyError("w1")


def test_error_in_a_pipeline_stage_is_that_of_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat, reports = RankHeartbeat({}), list[RankReport]()
    monkeypatch.setattr(heartbeat, "_put", lambda key, report: reports.append(report))
    try:
        try:
            block_that_fails()
        except KeyError as error:
            raise RuntimeError("\n  [Stage 1] failed to run forward:\n") from error
    except RuntimeError as error:
        heartbeat._report_error(error)
    assert reports[0].error == "RuntimeError: [Stage 1] failed to run forward: KeyError: 'w1'"
    line = block_that_fails.__code__.co_firstlineno + 1
    assert reports[0].place == f"tests/launcher/test_post_mortem.py:{line}"


def test_place_may_be_in_a_model_of_the_user() -> None:
    within = frames_of(TORCH / "nn/modules/linear.py", "/home/me/my_models/gptj.py")
    assert _place([*within, *frames_of(ROOT / "models/transformer.py")]) == (
        "/home/me/my_models/gptj.py:1"
    )


def test_place_of_an_installed_shardloom(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = Path("/venv/lib/python3.11/site-packages/shardloom")
    monkeypatch.setattr(post_mortem, "ROOT", installed)
    frames = frames_of("/venv/lib/python3.11/site-packages/numpy/x.py", installed / "train.py")
    assert _place(frames) == "train.py:1"


def test_place_is_the_innermost_shardloom_line() -> None:
    paths = [
        ROOT / ".venv/lib/site-packages/torch/x.py",
        ROOT / "data/loader.py",
        ROOT / "train.py",
    ]
    frames = [SimpleNamespace(f_code=SimpleNamespace(co_filename=str(path))) for path in paths]
    lines = cast(Any, list(zip(frames, (7, 8, 9), strict=True)))
    assert _place(lines) == "data/loader.py:8"
    assert _place(lines[:1]) == "an unknown place"


def frames_of(*paths: object) -> Any:
    return [
        (SimpleNamespace(f_code=SimpleNamespace(co_filename=str(path), co_name=str(path))), 1)
        for path in paths
    ]


def test_code_of_no_file_is_not_shardlooms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    imported = frames_of("<frozen importlib._bootstrap>", "<string>", ROOT / "train.py")
    assert _place(imported) == "train.py:1"


def test_code_of_a_users_model_is_in_no_collective() -> None:
    """Though a pipeline calls it."""
    stage, wait = DISTRIBUTED / "pipelining/stage.py", DISTRIBUTED / "distributed_c10d.py"
    library = Path(os.__file__).with_name("threading.py")
    for own in ("/home/user/my_model.py", library.parent / "site-packages/theirs/model.py"):
        assert _collective(frames_of(own, stage, ROOT / "forward_backward.py")) == ""
    assert _collective(frames_of(stage, ROOT / "forward_backward.py")) == str(stage)
    assert _collective(frames_of(library, TORCH / "a.py", wait, ROOT / "train.py")) == str(wait)


def test_snapshot_is_cheap() -> None:
    heartbeat = RankHeartbeat({})
    begin = time.perf_counter()
    for _ in range(100):
        place = heartbeat._snapshot().place
    # A snapshot is taken twelve times a minute.
    assert (time.perf_counter() - begin) / 100 < 0.02
    assert place.startswith("tests/launcher/test_post_mortem.py:")
