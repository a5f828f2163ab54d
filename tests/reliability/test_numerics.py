"""Rows 12, 20 and 21: slow ranks, nonfinite values, diverged replicas."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from config.job_config import Numerics, Optimizer
from metrics.stragglers import WINDOWS, Stragglers
from models import find_model
from optim.grad_norm import clip_grad_norm_, local_norms
from optim.loss import cross_entropy_sum
from optim.nonfinite import NonfiniteGuard
from optim.optimizer import build_optimizer
from parallelisms.materialize import materialize
from parallelisms.replicas import check_replicas
from tests.lib.layouts import CPU, MODE, REPLICATE, TP, Layout, shard_debugmodel
from tests.lib.ranks import RankPool

SEQ_LEN = 16
SLOW, SLEEP_SECONDS, WINDOW = 2, 0.03, 20


class Training:
    """Model, optimizer and nonfinite guard of a training run."""

    def __init__(self, layout: Layout) -> None:
        args = find_model("llama3", "debugmodel")[1]
        args = replace(args, n_layers=1, dim=32, hidden_dim=64, head_dim=8, max_seq_len=SEQ_LEN)
        sharded = shard_debugmodel("llama3", args, layout)
        self.model, dims = sharded.module, sharded.dims
        self.weight_mesh: DeviceMesh = dims.weight_mesh
        self.coordinate = dims.batch_mesh.get_local_rank()
        materialize(self.model, CPU, seed=3)
        self.named = dict(self.model.named_parameters())
        self.optimizer = build_optimizer(self.model, Optimizer(lr=1e-2))
        config = Numerics(on_nonfinite="skip")
        self.guard = NonfiniteGuard(
            self.optimizer,
            self.named,
            fqns=list(self.named),
            weight_mesh=self.weight_mesh,
            config=config,
        )

    def step(self, step: int, fault: "Fault | None" = None) -> None:
        loss = self.backward(step, fault)
        parameters = list(self.named.values())
        norms = local_norms(parameters)
        grad_norm = clip_grad_norm_(parameters, 1.0, norms=norms)
        self.guard.update_found_inf(step, loss=loss, norms=norms, grad_norm=grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def backward(self, step: int, fault: "Fault | None" = None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + self.coordinate)
        tokens = torch.randint(300, (2, SEQ_LEN + 1), generator=generator)
        logits = self.model(tokens[:, :-1])
        loss = cross_entropy_sum(logits, tokens[:, 1:], 100)
        hits = fault is not None and dist.get_rank() == fault.rank
        if hits and fault.place == "loss":
            loss = loss + fault.value
        if hits and fault.place == "backward":
            logits.register_hook(lambda gradient: gradient + fault.value)
        loss.backward()
        if hits and fault.place in self.named:
            # After the reduction, so only on this rank.
            local_of(self.named[fault.place].grad).view(-1)[:1] = fault.value
        return loss.detach()

    def state(self) -> dict[str, torch.Tensor]:
        """This rank's shard of every weight and of its optimizer state."""
        return {
            f"{fqn}.{key}": local_of(value)
            for fqn, parameter in self.named.items()
            for key, value in [("weight", parameter), *self.optimizer.state[parameter].items()]
        }

    def snapshot(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.state().items()}


def local_of(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def states_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# Row 20.


@dataclass(frozen=True)
class Fault:
    place: str
    """loss, backward (of this rank's batch) or the FQN of a reduced gradient."""
    value: float
    rank: int


ONE_GRADIENT = "layers.0.ffn_norm.weight"
FAULTS = [
    Fault(place, value, rank)
    for place in ("loss", "backward", ONE_GRADIENT)
    for value in (math.nan, math.inf)
    for rank in (0, 1)
]
LAYOUTS = [
    Layout(2),
    Layout(4, {REPLICATE: 2}),
    Layout(2, {TP: 2}),
    Layout(2, {MODE: "ddp"}),
    Layout(2, {MODE: "simple_fsdp"}),
]


def check_faults(layout: Layout) -> list[str]:
    """Bad steps between good ones, compared with a clean run; return the reports."""
    faulty, clean = Training(layout), Training(layout)
    reports = []
    for start in range(0, len(FAULTS) + 2, 2):
        faulty.step(start)
        clean.step(start)
        assert states_equal(faulty.state(), clean.state()), f"after {FAULTS[:start][-2:]}"
        # The guard stops a run at the third bad step in a row.
        for fault in FAULTS[start : start + 2]:
            before = faulty.snapshot()
            faulty.step(1000, fault)
            assert states_equal(faulty.state(), before), f"{fault} changed something"
            with patch("optim.nonfinite.logger") as logger:
                assert not faulty.guard.should_stop()
            reports.append(logger.warning.call_args.args[2])
    return reports


@pytest.mark.row(20, "What is not finite never enters weights or a checkpoint")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_bad_step_changes_no_state_on_any_rank(
    ranks: RankPool, layout: Layout, record_result: Callable[[str], None]
) -> None:
    found = ranks.run(check_faults, layout.world_size, layout)
    assert all(reports == found[0] for reports in found), "ranks disagree"
    expected = {"loss": "the loss", ONE_GRADIENT: f"the gradient of {ONE_GRADIENT}"}
    for fault, report in zip(FAULTS, found[0], strict=True):
        # A bad backward makes all gradients bad, and the first one is reported.
        assert report == expected.get(fault.place, "the gradient of tok_embeddings.weight")
    record_result(
        f"{layout}: {len(FAULTS)} of {len(FAULTS)} bad steps changed no bit and were named"
    )


def check_unguarded(layout: Layout, fault: Fault) -> bool:
    """True if every weight has a nonfinite shard on some rank."""
    training = Training(layout)
    del training.optimizer.found_inf  # type: ignore[attr-defined]
    training.step(1, fault)
    is_bad = [not local_of(parameter).isfinite().all() for parameter in training.named.values()]
    counts = torch.tensor(is_bad).long()
    dist.all_reduce(counts)
    return bool((counts > 0).all())


@pytest.mark.row(20, "What is not finite never enters weights or a checkpoint")
@pytest.mark.parametrize("place", ["backward", ONE_GRADIENT])
def test_unguarded_bad_step_corrupts_every_weight(ranks: RankPool, place: str) -> None:
    assert ranks.run(check_unguarded, 2, Layout(2), Fault(place, math.nan, 1)) == [True, True]


def check_alone(layout: Layout, fault: Fault) -> bool:
    """True if this rank's update is masked if the guard does not all-reduce."""
    training = Training(layout)
    training.guard._groups = []
    training.step(1, fault)
    return bool(training.guard.found_inf)


@pytest.mark.row(20, "What is not finite never enters weights or a checkpoint")
def test_ranks_disagree_without_the_all_reduce(ranks: RankPool) -> None:
    assert ranks.run(check_alone, 2, Layout(2), Fault("loss", math.inf, 1)) == [False, True]


# Row 21.


def check_flips(layout: Layout, count: int) -> list[tuple[str, int, str]]:
    """Flip one random bit ``count`` times; return its tensor, its rank and the reported error."""
    training = Training(layout)
    training.step(1)
    generator = torch.Generator().manual_seed(0)

    def pick(bound: int) -> int:
        return int(torch.randint(bound, (), generator=generator))

    names = sorted(training.state())
    found = []
    for _ in range(count):
        name, rank, place, bit = names[pick(len(names))], pick(layout.world_size), pick(1 << 30), 0
        bits = training.state()[name].view(-1).view(torch.uint8)
        place, bit = place % max(1, bits.numel()), 1 << pick(8)
        hits = dist.get_rank() == rank and bits.numel() > 0
        if hits:
            bits[place] ^= bit
        text = replica_error(training)
        if hits:
            bits[place] ^= bit
        found.append((name.removesuffix(".weight"), rank, text))
    assert replica_error(training) == ""
    return found


def replica_error(training: Training) -> str:
    try:
        check_replicas(training.model, training.weight_mesh, training.optimizer)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.row(21, "Replicas that differ are caught")
@pytest.mark.parametrize(
    ("layout", "culprit"),
    [
        (Layout(4, {MODE: "ddp"}), "rank {rank} against 3 that agree"),
        (Layout(4, {REPLICATE: 2}), "no majority among ranks {first}, {second}"),
    ],
    ids=str,
)
def test_flipped_bit_is_reported(
    ranks: RankPool,
    layout: Layout,
    culprit: str,
    trials: Callable[..., int],
    record_result: Callable[[str], None],
) -> None:
    count = trials(50)
    found = ranks.run(check_flips, layout.world_size, layout, count)
    for answers in zip(*found, strict=True):
        name, rank, text = answers[0][0], answers[0][1], answers[answers[0][1]][2]
        # Step counts are on every rank, so a flip also differs from the other shards' counts.
        first, second = rank % 2, rank % 2 + 2
        assert f"along dp_replicate differ, first in {name}" in text, text
        assert culprit.format(rank=rank, first=first, second=second) in text, text
    record_result(f"{layout}: {count} of {count} flipped bits named, with tensor and ranks")


def check_false_alarms(layout: Layout, count: int) -> None:
    training = Training(layout)
    for step in range(count):
        training.step(step)
        assert check_replicas(training.model, training.weight_mesh, training.optimizer)


@pytest.mark.row(21, "Replicas that differ are caught")
@pytest.mark.parametrize("layout", [Layout(4, {REPLICATE: 2}), Layout(2, {MODE: "ddp"})], ids=str)
def test_equal_replicas_raise_no_error(
    ranks: RankPool,
    layout: Layout,
    trials: Callable[..., int],
    record_result: Callable[[str], None],
) -> None:
    count = trials(500, usually=20)
    ranks.run(check_false_alarms, layout.world_size, layout, count)
    record_result(f"{layout}: 0 false alarms in {count} steps")


# Row 12.


@contextmanager
def slow_forward(block: nn.Module, seconds: float) -> Iterator[None]:
    forward = block.forward

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return forward(*args, **kwargs)

    with patch.object(block, "forward", slow):
        yield


def watch(layout: Layout, late: list[int]) -> list[str]:
    """Train for the first windows of a run, ``late`` ranks slowly; return the logged warnings.

    All sleep: a block of microseconds would time what else the machine does.
    """
    training = Training(layout)
    blocks = cast(nn.ModuleDict, training.model.layers)
    seconds = SLEEP_SECONDS * (2 if dist.get_rank() in late else 1)
    with patch("metrics.stragglers.logger") as logger, slow_forward(blocks["0"], seconds):
        stragglers = Stragglers(blocks.values(), window=WINDOW, device=CPU)
        for step in range(WINDOWS * WINDOW):
            training.backward(step)
            stragglers.end_step()
    return [call.args[0] % call.args[1:] for call in logger.warning.call_args_list]


@pytest.mark.row(12, "A slow rank is named")
def test_slow_rank_is_reported(
    ranks: RankPool, trials: Callable[..., int], record_result: Callable[[str], None]
) -> None:
    count = trials(20, usually=1)
    for _ in range(count):
        for lines in ranks.run(watch, 4, Layout(4), [SLOW]):
            assert len(lines) == 1
            assert lines[0].startswith(f"rank {SLOW} on ")
    record_result(
        f"{count} of {count} times within {WINDOWS} windows of {WINDOW} steps, 30 ms late"
    )


@pytest.mark.row(12, "A slow rank is named")
def test_equal_ranks_log_no_warning(
    ranks: RankPool, trials: Callable[..., int], record_result: Callable[[str], None]
) -> None:
    count = trials(20, usually=1)
    for _ in range(count):
        assert ranks.run(watch, 4, Layout(4), []) == [[], [], [], []]
    record_result(f"0 alarms in {count} clean runs of {WINDOWS} windows of {WINDOW} steps")
