"""Slow ranks are named by rank and host, once; only compute is timed, and nothing waits for it."""

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
from tests.layouts import CPU, MODE, REPLICATE, TP, Layout, build_sharded
from tests.ranks import RankPool

FULL = ActivationCheckpoint(mode="full")
AOT = Compile(enable=True, backend="aot_eager")
GPU = torch.device("cuda")


def answered(hosts: list[str], times: Callable[[float], list[float]]) -> Any:
    """What ranks tell each other: first the names of their hosts, then seconds."""

    def answer(value: str | float) -> list[Any]:
        return hosts if isinstance(value, str) else times(value)

    return patch("metrics.stragglers.everywhere", answer)


@contextmanager
def windows(times: list[list[float]]) -> Iterator[tuple[Stragglers, list[str]]]:
    """Windows of one step, in which ranks took these times; and what is logged."""
    hosts, given = [f"host{rank}" for rank in range(len(times[0]))], iter(times)
    with answered(hosts, lambda value: next(given)), patch("metrics.stragglers.logger") as logger:
        lines: list[str] = []
        logger.warning = lambda text, *values: lines.append(text % values)
        yield Stragglers([nn.Identity()], window=1, device=CPU), lines


def named(times: list[list[float]]) -> list[tuple[int, str]]:
    """After which window, and what is said."""
    with windows(times) as (stragglers, lines):
        found = []
        for window in range(1, len(times) + 1):
            stragglers.finish_step()
            found += [(window, line) for line in lines]
            lines.clear()
    return found


def test_a_slow_rank_is_named_once_in_its_third_window() -> None:
    times = [[1.0, 1.1, 1.5, 1.1]] * 7
    text = "rank 2 on host2 is slow: its blocks take 1.36 times the median of all ranks"
    assert named(times) == [(3, text)]


def test_two_windows_are_not_enough() -> None:
    slow, equal = [1.0, 1.0, 2.0], [1.0, 1.0, 1.0]
    assert named([slow, slow, equal, slow, slow, equal]) == []
    assert [window for window, _ in named([slow, slow, equal, slow, slow, slow])] == [6]


@pytest.mark.parametrize("times", [[1.0, 2.0], [1.0, 1.0, 2.0, 2.0], [2.0, 1.0, 2.0, 1.0, 1.0]])
def test_half_of_the_ranks_may_be_slow(times: list[float]) -> None:
    found = [line.split()[1] for _, line in named([times] * 3)]
    assert found == [str(rank) for rank, seconds in enumerate(times) if seconds == 2.0]


def test_noise_below_the_limit_is_no_alarm(trials) -> None:
    source = random.Random(0)
    for _ in range(trials(200)):
        base = source.uniform(1e-5, 10.0)
        count = source.randint(1, 64)
        times = [[base * source.uniform(1.0, 1.2) for _ in range(count)] for _ in range(10)]
        assert named(times) == []
    assert named([[1.0, 1.0, 1.21]] * 3) != []


def test_a_window_is_of_its_own_steps() -> None:
    given: list[float] = []
    with answered(["here"], lambda value: given.append(value) or [value]):
        stragglers = Stragglers([nn.Identity()], window=2, device=CPU)
        steps = iter([1.0, 1.0, 5.0, 5.0])
        stragglers._clock = cast(Any, SimpleNamespace(finish_step=lambda: [next(steps)]))
        for _ in range(4):
            stragglers.finish_step()
    assert given == [1.0, 5.0]


def test_between_windows_the_last_one_counts() -> None:
    with windows([[1.0, 3.0], [2.0, 2.0]]) as (stragglers, _):
        stragglers._window = 3
        found = [stragglers.finish_step().get("slowest_over_median") for _ in range(8)]
    assert found == [None, None, 3.0, 3.0, 3.0, 1.0, 1.0, 1.0]


def test_the_slowest_is_in_the_metrics() -> None:
    with windows([[1.0, 1.0, 1.5], [3.0, 2.0, 2.0]]) as (stragglers, _):
        assert stragglers.finish_step() == {"slowest_rank": 2, "slowest_over_median": 1.5}
        assert stragglers.finish_step() == {"slowest_rank": 0, "slowest_over_median": 1.5}


def test_a_rank_with_nothing_to_say_yet_is_waited_for() -> None:
    slow = [1.0, 1.0, 2.0]
    with windows([[1.0, 0.0, 2.0], slow, [1.0, 0.0, 2.0], slow, slow]) as (stragglers, lines):
        assert [bool(stragglers.finish_step()) for _ in range(4)] == [False, True, True, True]
        assert not lines
        stragglers.finish_step()
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
def test_events_are_read_when_the_device_is_past_them(lag: int) -> None:
    """Each block takes 1 s on that device, so a step of three takes 3 s, whenever it is read."""
    Event.now, Event.lag = 0, lag
    blocks = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    given: list[float] = []
    made = []
    with (
        patch("metrics.stragglers._event", lambda: made.append(Event()) or made[-1]),
        answered(["here"], lambda value: given.append(value) or [value]),
    ):
        stragglers = Stragglers(list(blocks), window=4, device=GPU)
        for _ in range(40):
            blocks(torch.ones(2))
            stragglers.finish_step()
    assert given == [1.0] * 10
    assert len(made) <= 6 + 2 * lag, "events are used again"


@pytest.mark.parametrize(
    ("grad", "expected"), [(torch.enable_grad, 3), (torch.no_grad, 0)], ids=["train", "validate"]
)
def test_only_training_is_timed(grad: Any, expected: int) -> None:
    blocks = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    with answered(["here"], lambda value: [value]):
        stragglers = Stragglers(list(blocks), window=1, device=CPU)
    with patch.object(stragglers, "_clock") as clock, grad():
        blocks(torch.ones(2))
    assert clock.start.call_count == clock.stop.call_count == expected


class Witness:
    """In place of a clock: whether a block's weights are whole when it starts and stops."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        self.blocks = cycle(blocks)
        self.found = Counter[str]()

    def start(self) -> None:
        self.block = next(self.blocks)
        self._see("start")

    def stop(self) -> None:
        self._see("stop")

    def _see(self, when: str) -> None:
        is_sharded = isinstance(next(self.block.parameters()), DTensor)
        self.found[f"{when} {'sharded' if is_sharded else 'whole'}"] += 1


def after_all_others(self: nn.Module, hook: Any, *, prepend: bool) -> None:
    original_hook(self, hook, prepend=False)


original_hook = nn.Module.register_forward_hook


def witness(layout: Layout, is_late: bool) -> tuple[dict[str, int], int]:
    """What is seen in two forwards of four blocks, and the number of graphs compiled for them."""
    args = replace(find_model("llama3", "debugmodel")[1], n_layers=4, dim=32, hidden_dim=64)
    model, _ = build_sharded("llama3", replace(args, head_dim=8, max_seq_len=16), layout)
    materialize(model, CPU, seed=0)
    blocks = list(cast(nn.ModuleDict, model.layers).values())
    register = after_all_others if is_late else original_hook
    with patch.object(nn.Module, "register_forward_hook", register):
        stragglers = Stragglers(blocks, window=1, device=CPU)
    stragglers._clock = cast(Any, Witness(blocks))
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
def test_weights_are_whole_while_the_clock_runs(ranks: RankPool, layout: Layout) -> None:
    """So no gather is timed. Recomputation is not either; compiled blocks still share a graph."""
    for found, graphs in ranks.run(witness, layout.world_size, layout, False):
        assert found == {"start whole": 8, "stop whole": 8}
        assert graphs == layout.compile.enable


def test_a_clock_that_stops_too_late_is_seen(ranks: RankPool) -> None:
    found, _ = ranks.run(witness, 2, TIMED[0], True)[0]
    assert found == {"start whole": 8, "stop sharded": 8}


def slow_rank(layout: Layout, rank: int, seconds: float) -> list[float]:
    """The slowest rank, how slow, and all ranks' times of a block; one sleeps in one of two."""
    args = replace(find_model("llama3", "debugmodel")[1], n_layers=2, dim=32, hidden_dim=64)
    model, dims = build_sharded("llama3", replace(args, head_dim=8, max_seq_len=16), layout)
    materialize(model, CPU, seed=0)
    blocks = list(cast(nn.ModuleDict, model.layers).values())
    stragglers = Stragglers(blocks, window=8, device=CPU)
    if dims.weight_mesh.get_rank() == rank:
        sleep = torch.compiler.disable(lambda module, inputs: time.sleep(seconds))
        blocks[0].register_forward_pre_hook(sleep)
    for _ in range(8):
        model(torch.zeros(1, 16, dtype=torch.long)).sum().backward()
        values = stragglers.finish_step()
    return [values["slowest_rank"], values["slowest_over_median"], *stragglers._recent[-1]]


@pytest.mark.parametrize(
    "layout", [Layout(2), Layout(2, {MODE: "ddp"}), Layout(2, compile=AOT, recompute=FULL)], ids=str
)
def test_a_sleep_is_found_where_it_is(ranks: RankPool, layout: Layout) -> None:
    for found in ranks.run(slow_rank, 2, layout, 1, 0.5):
        assert found[0] == 1
        assert found[1] > 1.2
        assert found[3] > 0.25


def test_ranks_of_a_tensor_parallel_group_are_slow_together(ranks: RankPool) -> None:
    times = ranks.run(slow_rank, 4, Layout(4, {TP: 2}), 2, 0.5)[0][2:]
    assert min(times[2:]) > 0.25 > max(times[:2])
