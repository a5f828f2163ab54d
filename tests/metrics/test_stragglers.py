"""Slow ranks are logged once, with their host; only compute is timed, without device syncs."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.nn as nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from config.job_config import ActivationCheckpoint, Compile
from metrics.stragglers import Stragglers
from models import find_model
from parallelisms.materialize import materialize
from tests.lib.layouts import CPU, MODE, REPLICATE, TP, Layout, shard_debugmodel
from tests.lib.ranks import RankPool

FULL = ActivationCheckpoint(mode="full")
AOT = Compile(enable=True, backend="aot_eager")
GPU = torch.device("cuda")


def fake_gather(hosts: list[str], times: Callable[[float], list[float]]) -> Any:
    """Patch all_gather_object: it returns ``hosts``, then ``times`` in seconds."""

    def gather(value: str | float) -> list[Any]:
        return hosts if isinstance(value, str) else times(value)

    return patch("metrics.stragglers.all_gather_object", gather)


@contextmanager
def windows(times: list[list[float]]) -> Iterator[tuple[Stragglers, list[str]]]:
    """Stragglers with windows of one step and these times per rank, and the logged warnings."""
    hosts, given = [f"host{rank}" for rank in range(len(times[0]))], iter(times)
    with (
        fake_gather(hosts, lambda value: next(given)),
        patch("metrics.stragglers.logger") as logger,
    ):
        lines: list[str] = []
        logger.warning = lambda text, *values: lines.append(text % values)
        yield Stragglers([nn.Identity()], window=1, device=CPU), lines


def warnings_of(times: list[list[float]]) -> list[tuple[int, str]]:
    """(window, warning) for each warning."""
    with windows(times) as (stragglers, lines):
        found = []
        for window in range(1, len(times) + 1):
            stragglers.end_step()
            found += [(window, line) for line in lines]
            lines.clear()
    return found


def test_slow_rank_is_logged_once_in_its_third_window() -> None:
    times = [[1.0, 1.1, 1.5, 1.1]] * 7
    text = "rank 2 on host2 is slow: its blocks take 1.36 times the median of all ranks"
    assert warnings_of(times) == [(3, text)]


def test_two_windows_are_not_enough() -> None:
    slow, equal = [1.0, 1.0, 2.0], [1.0, 1.0, 1.0]
    assert warnings_of([slow, slow, equal, slow, slow, equal]) == []
    assert [window for window, _ in warnings_of([slow, slow, equal, slow, slow, slow])] == [6]


@pytest.mark.parametrize("times", [[1.0, 2.0], [1.0, 1.0, 2.0, 2.0], [2.0, 1.0, 2.0, 1.0, 1.0]])
def test_half_of_the_ranks_may_be_slow(times: list[float]) -> None:
    found = [line.split()[1] for _, line in warnings_of([times] * 3)]
    assert found == [str(rank) for rank, seconds in enumerate(times) if seconds == 2.0]


def test_noise_below_the_limit_is_not_logged(trials) -> None:
    source = random.Random(0)
    for _ in range(trials(200)):
        base = source.uniform(1e-5, 10.0)
        count = source.randint(1, 64)
        times = [[base * source.uniform(1.0, 1.2) for _ in range(count)] for _ in range(10)]
        assert warnings_of(times) == []
    assert warnings_of([[1.0, 1.0, 1.21]] * 3) != []


def test_window_uses_only_its_own_steps() -> None:
    times_seen: list[float] = []
    with fake_gather(["here"], lambda value: times_seen.append(value) or [value]):
        stragglers = Stragglers([nn.Identity()], window=2, device=CPU)
        steps = iter([1.0, 1.0, 5.0, 5.0])
        stragglers._clock = cast(Any, SimpleNamespace(pop_elapsed=lambda: [next(steps)]))
        for _ in range(4):
            stragglers.end_step()
    assert times_seen == [1.0, 5.0]


def test_metrics_between_windows_are_those_of_the_last() -> None:
    with windows([[1.0, 3.0], [2.0, 2.0]]) as (stragglers, _):
        stragglers._window = 3
        found = [stragglers.end_step().get("slowest_over_median") for _ in range(8)]
    assert found == [None, None, 3.0, 3.0, 3.0, 1.0, 1.0, 1.0]


def test_slowest_rank_is_in_the_metrics() -> None:
    with windows([[1.0, 1.0, 1.5], [3.0, 2.0, 2.0]]) as (stragglers, _):
        assert stragglers.end_step() == {"slowest_rank": 2, "slowest_over_median": 1.5}
        assert stragglers.end_step() == {"slowest_rank": 0, "slowest_over_median": 1.5}


def test_window_without_times_of_all_ranks_is_ignored() -> None:
    slow = [1.0, 1.0, 2.0]
    with windows([[1.0, 0.0, 2.0], slow, [1.0, 0.0, 2.0], slow, slow]) as (stragglers, lines):
        assert [bool(stragglers.end_step()) for _ in range(4)] == [False, True, True, True]
        assert not lines
        stragglers.end_step()
        assert len(lines) == 1


class Event:
    """A CUDA event on a device that is ``lag`` records behind."""

    now, lag = 0, 0

    def record(self) -> None:
        Event.now += 1
        self.time = Event.now

    def query(self) -> bool:
        return self.time <= Event.now - Event.lag

    def elapsed_time(self, end: "Event") -> float:
        assert self.query()
        assert end.query()
        return 1000.0 * (end.time - self.time)


@pytest.mark.parametrize("lag", [0, 3, 10])
def test_events_are_read_after_the_device_completed_them(lag: int) -> None:
    """Each block takes 1 s on the device, so three take 3 s whenever the events are read."""
    Event.now, Event.lag = 0, lag
    blocks = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    times_seen: list[float] = []
    made = []
    with (
        patch("metrics.stragglers._event", lambda: made.append(Event()) or made[-1]),
        fake_gather(["here"], lambda value: times_seen.append(value) or [value]),
    ):
        stragglers = Stragglers(list(blocks), window=4, device=GPU)
        for _ in range(40):
            blocks(torch.ones(2))
            stragglers.end_step()
    assert times_seen == [1.0] * 10
    assert len(made) <= 6 + 2 * lag, "events are reused"


def test_step_in_which_no_block_runs_has_no_time() -> None:
    Event.now, Event.lag = 0, 0
    block, times_seen = nn.Linear(2, 2), list[float]()
    with (
        patch("metrics.stragglers._event", Event),
        fake_gather(["here"], lambda value: times_seen.append(value) or [value]),
    ):
        stragglers = Stragglers([block], window=2, device=GPU)
        stragglers.end_step()
        block(torch.ones(2))
        stragglers.end_step()
    assert times_seen == [1.0]


@pytest.mark.parametrize(
    ("grad", "expected"), [(torch.enable_grad, 3), (torch.no_grad, 0)], ids=["train", "validate"]
)
def test_only_forward_with_grad_is_timed(grad: Any, expected: int) -> None:
    blocks = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    with fake_gather(["here"], lambda value: [value]):
        stragglers = Stragglers(list(blocks), window=1, device=CPU)
    with patch.object(stragglers, "_clock") as clock, grad():
        blocks(torch.ones(2))
    assert clock.start.call_count == clock.stop.call_count == expected


class ShardingProbe:
    """Replaces the clock: counts whether weights are unsharded when it starts and stops."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        self.blocks = cycle(blocks)
        self.found = Counter[str]()

    def start(self) -> None:
        self.block = next(self.blocks)
        self._count("start")

    def stop(self) -> None:
        self._count("stop")

    def _count(self, when: str) -> None:
        is_sharded = isinstance(next(self.block.parameters()), DTensor)
        self.found[f"{when} {'sharded' if is_sharded else 'whole'}"] += 1


def register_last(self: nn.Module, hook: Any, *, prepend: bool) -> None:
    original_hook(self, hook, prepend=False)


original_hook = nn.Module.register_forward_hook


def probe_sharding(layout: Layout, registers_last: bool) -> tuple[dict[str, int], int]:
    """Counts over two forward passes of four blocks, and the number of compiled graphs."""
    args = replace(find_model("llama3", "debugmodel")[1], n_layers=4, dim=32, hidden_dim=64)
    model = shard_debugmodel("llama3", replace(args, head_dim=8, max_seq_len=16), layout).module
    materialize(model, CPU, seed=0)
    blocks = list(cast(nn.ModuleDict, model.layers).values())
    register = register_last if registers_last else original_hook
    with patch.object(nn.Module, "register_forward_hook", register):
        stragglers = Stragglers(blocks, window=1, device=CPU)
    stragglers._clock = cast(Any, ShardingProbe(blocks))
    torch.compiler.reset()
    counters.clear()
    for _ in range(2):
        model(torch.zeros(1, 16, dtype=torch.long)).sum().backward()
    return dict(cast(Any, stragglers._clock).found), counters["stats"]["unique_graphs"]


ALWAYS = {"fsdp_reshard_after_forward": "always"}
TIMED = [
    Layout(2, ALWAYS),
    Layout(4, {REPLICATE: 2}),
    Layout(2, ALWAYS, recompute=FULL),
    Layout(2, {MODE: "ddp"}),
    Layout(2, ALWAYS, compile=AOT),
    Layout(2, ALWAYS, compile=AOT, recompute=FULL),
    Layout(2, {MODE: "ddp"}, compile=AOT),
]


@pytest.mark.parametrize("layout", TIMED, ids=str)
def test_weights_are_unsharded_while_the_clock_runs(ranks: RankPool, layout: Layout) -> None:
    """Neither all-gathers nor recomputation are timed; compiled blocks share one graph."""
    for found, graphs in ranks.run(probe_sharding, layout.world_size, layout, False):
        assert found == {"start whole": 8, "stop whole": 8}
        assert graphs == layout.compile.enable


def test_probe_detects_a_clock_that_stops_too_late(ranks: RankPool) -> None:
    found, _ = ranks.run(probe_sharding, 2, TIMED[0], True)[0]
    assert found == {"start whole": 8, "stop sharded": 8}


def train_with_slow_rank(layout: Layout, rank: int, seconds: float) -> list[float]:
    """[slowest rank, its ratio, *each rank's time of a block]; ``rank`` sleeps in a block."""
    args = replace(find_model("llama3", "debugmodel")[1], n_layers=2, dim=32, hidden_dim=64)
    sharded = shard_debugmodel("llama3", replace(args, head_dim=8, max_seq_len=16), layout)
    model, dims = sharded.module, sharded.dims
    materialize(model, CPU, seed=0)
    blocks = list(cast(nn.ModuleDict, model.layers).values())
    stragglers = Stragglers(blocks, window=8, device=CPU)
    if dims.weight_mesh.get_rank() == rank:
        sleep = torch.compiler.disable(lambda module, inputs: time.sleep(seconds))
        blocks[0].register_forward_pre_hook(sleep)
    for _ in range(8):
        model(torch.zeros(1, 16, dtype=torch.long)).sum().backward()
        values = stragglers.end_step()
    return [values["slowest_rank"], values["slowest_over_median"], *stragglers._recent[-1]]


@pytest.mark.parametrize(
    "layout", [Layout(2), Layout(2, {MODE: "ddp"}), Layout(2, compile=AOT, recompute=FULL)], ids=str
)
def test_sleeping_rank_is_the_slowest(ranks: RankPool, layout: Layout) -> None:
    for found in ranks.run(train_with_slow_rank, 2, layout, 1, 0.5):
        assert found[0] == 1
        assert found[1] > 1.2
        assert found[3] > 0.25


def test_ranks_of_a_tensor_parallel_group_are_slow_together(ranks: RankPool) -> None:
    times = ranks.run(train_with_slow_rank, 4, Layout(4, {TP: 2}), 2, 0.5)[0][2:]
    assert min(times[2:]) > 0.25 > max(times[:2])
