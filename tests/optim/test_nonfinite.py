"""Nonfinite updates are masked bit for bit, and the host polls the result."""

import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.nn as nn
from torch.optim import AdamW

from config.job_config import Numerics
from optim.chunked_adamw import ChunkedAdamW
from optim.grad_norm import clip_grad_norm_, local_norms
from optim.nonfinite import NonfiniteGuard
from runtime.log import logger
from tests.lib.host_sync import forbid_host_sync

ONE_RANK = cast(Any, SimpleNamespace(shape=(1, 1)))
GOOD, BAD = 1.0, math.nan
SKIP = Numerics(on_nonfinite="skip", max_skipped=3)


class SmallRun:
    """Three weights, their optimizer and guard; gradients are a function of the step."""

    def __init__(self, config: Numerics = SKIP, *, kind: type[torch.optim.AdamW] = AdamW) -> None:
        generator = torch.Generator().manual_seed(0)
        weights = {name: torch.randn(4, 3, generator=generator) for name in ("wq", "wk", "wv")}
        self.parameters = {name: nn.Parameter(weight) for name, weight in weights.items()}
        self.optimizer = kind(self.parameters.values(), fused=True)
        self.guard = NonfiniteGuard(
            self.optimizer,
            self.parameters,
            # The first FQN is on another pipeline stage.
            fqns=["tok_embeddings", *self.parameters],
            weight_mesh=ONE_RANK,
            config=config,
        )

    def step(self, step: int, loss: float = 1.0, **gradients: float) -> None:
        """``gradients``: value of one gradient element, by the weight's name."""
        generator = torch.Generator().manual_seed(step)
        for name, parameter in self.parameters.items():
            parameter.grad = torch.randn(4, 3, generator=generator)
            parameter.grad[1, 2] = gradients.get(name, 0.5)
        parameters = list(self.parameters.values())
        norms = local_norms(parameters)
        norm = clip_grad_norm_(parameters, 1.0, norms=norms)
        self.guard.update_found_inf(step, loss=torch.tensor(loss), norms=norms, grad_norm=norm)
        self.guard.step()

    def state(self) -> list[torch.Tensor]:
        tensors = []
        for parameter in self.parameters.values():
            state = self.optimizer.state[parameter]
            tensors += [parameter.detach().clone(), *(state[k].clone() for k in sorted(state))]
        return tensors


def is_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@contextmanager
def captured_logs() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize("kind", [AdamW, ChunkedAdamW])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["loss", "wq", "wv"])
def test_nonfinite_step_changes_no_bit(name: str, value: float, kind: type[AdamW]) -> None:
    run, reference = SmallRun(kind=kind), SmallRun(kind=kind)
    for step in (1, 2):
        run.step(step)
        reference.step(step)
    before = run.state()
    run.step(3, **{name: value})
    assert is_equal(run.state(), before)
    run.step(4)
    reference.step(4)
    assert is_equal(run.state(), reference.state())
    assert not is_equal(run.state(), before)


def test_finite_step_equals_unguarded_optimizer() -> None:
    run, unguarded = SmallRun(), SmallRun()
    del unguarded.optimizer.found_inf  # type: ignore[attr-defined]
    for step in (1, 2, 3):
        run.step(step)
        unguarded.step(step)
    assert is_equal(run.state(), unguarded.state())


def test_optimizer_that_ignores_found_inf_makes_no_nonfinite_step() -> None:
    run = SmallRun()
    run.optimizer = AdamW(run.parameters.values(), foreach=True)
    names = ["tok_embeddings", *run.parameters]
    run.guard = NonfiniteGuard(
        run.optimizer, run.parameters, fqns=names, weight_mesh=ONE_RANK, config=SKIP
    )
    check_only_finite_steps_are_made(run)


def check_only_finite_steps_are_made(run: SmallRun) -> None:
    run.step(1)
    before = run.state()
    run.step(2, wk=BAD)
    assert is_equal(run.state(), before)
    run.step(3)
    assert not is_equal(run.state(), before)


class DecaysFirst(AdamW):
    """AdamW, after a decay of its own, which obeys nobody."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.5)
        super().step()


def test_own_step_of_a_fused_adamw_is_skipped_as_a_whole() -> None:
    check_only_finite_steps_are_made(SmallRun(kind=DecaysFirst))


def test_first_step_may_be_nonfinite() -> None:
    run, reference = SmallRun(), SmallRun()
    run.step(1, wk=BAD)
    run.step(2)
    reference.step(2)
    assert is_equal(run.state(), reference.state())


def test_unmasked_nonfinite_step_ruins_all_weights() -> None:
    run = SmallRun()
    run.step(1)
    with patch.object(run.guard, "_decide", lambda step, index: None):
        run.step(2, wk=BAD)
    assert all(weight.isnan().any() for weight in run.parameters.values())


def test_stop_masks_all_later_updates() -> None:
    run = SmallRun(Numerics(on_nonfinite="stop"))
    run.step(1)
    assert not run.guard.should_stop()
    before = run.state()
    run.step(2, wk=BAD)
    run.step(3)
    run.step(4)
    assert is_equal(run.state(), before)
    assert run.guard.should_stop()


@pytest.mark.parametrize(
    ("losses", "should_stop"),
    [
        ([BAD, BAD, GOOD, BAD, BAD, GOOD], False),
        ([GOOD, BAD, BAD, BAD], True),
        # The host polls after a finite step.
        ([BAD, BAD, BAD, GOOD, GOOD], True),
    ],
)
def test_run_stops_after_too_many_consecutive_steps(losses: list[float], should_stop: bool) -> None:
    run = SmallRun()
    for step, loss in enumerate(losses, 1):
        run.step(step, loss)
    assert run.guard.should_stop() == should_stop


def test_updates_after_the_limit_are_masked() -> None:
    run = SmallRun()
    run.step(1)
    before = run.state()
    for step, loss in enumerate([BAD, BAD, BAD, GOOD], 2):
        run.step(step, loss)
    assert is_equal(run.state(), before)


def test_first_nonfinite_value_is_logged_with_its_step() -> None:
    run = SmallRun()
    with captured_logs() as lines:
        run.step(1)
        run.guard.should_stop()
        run.step(2, wv=math.inf, wk=math.nan)
        run.step(3, wq=math.nan)
        run.step(4)
        run.guard.should_stop()
        run.guard.should_stop()
        run.step(5, BAD, wq=math.nan)
        run.guard.should_stop()
    start = [line.partition(" is not finite")[0] for line in lines]
    assert start == ["step 2: the gradient of wk", "step 5: the loss"]
    assert "2 updates skipped since, 2 in total" in lines[0]
    assert "1 updates skipped since, 3 in total" in lines[1]
    assert run.guard.skipped == 3


def test_gradients_whose_squares_overflow_together_are_clipped() -> None:
    run = SmallRun()
    run.step(1, wq=1.5e19, wk=1.5e19, wv=1.5e19)
    assert not run.guard.should_stop()
    assert run.guard.skipped == 0
    gradients = [parameter.grad for parameter in run.parameters.values()]
    assert all(
        grad is not None and grad[1, 2].item() == pytest.approx(3**-0.5) for grad in gradients
    )


def test_nonfinite_gradient_norm_is_named() -> None:
    run = SmallRun()
    one, infinite = torch.ones(()), torch.tensor(math.inf)
    with captured_logs() as lines:
        run.guard.update_found_inf(1, loss=one, norms=[one] * 3, grad_norm=infinite)
        run.guard.step()
        run.guard.should_stop()
    assert "the gradient norm (each gradient is finite) is not finite" in lines[0]


def test_counters_are_checkpointed() -> None:
    uninterrupted, resumed = SmallRun(), SmallRun()
    losses = [BAD, GOOD, BAD, BAD, BAD]
    for step, loss in enumerate(losses[:4], 1):
        uninterrupted.step(step, loss)
    state = json.loads(json.dumps(uninterrupted.guard.state_dict()))
    assert state == {"skipped": 3, "in_a_row": 2}
    resumed.guard.load_state_dict(state)
    assert resumed.guard.skipped == 3
    assert not resumed.guard.should_stop()
    for run in (uninterrupted, resumed):
        run.step(5, losses[4])
        assert run.guard.should_stop()
        assert run.guard.state_dict() == {"skipped": 4, "in_a_row": 3}


def test_loaded_state_unmasks_updates() -> None:
    """A rollback restores the guard's state too."""
    run = SmallRun(Numerics(on_nonfinite="stop"))
    saved = run.guard.state_dict()
    run.step(1, BAD)
    assert run.guard.should_stop()
    run.guard.load_state_dict(saved)
    before = run.state()
    run.step(2)
    assert not run.guard.should_stop()
    assert not is_equal(run.state()[:1], before[:1])


def test_update_found_inf_does_not_sync_with_host() -> None:
    run = SmallRun()
    with forbid_host_sync():
        run.step(1)
        run.step(2, wk=BAD)
    for sync in (run.guard.should_stop, run.guard.state_dict):
        with forbid_host_sync(), pytest.raises(AssertionError, match="waits"):
            sync()


def test_weight_without_gradient_is_finite() -> None:
    run = SmallRun()
    run.step(1)
    run.parameters["wk"].grad = None
    parameters = list(run.parameters.values())
    norms = local_norms(parameters)
    assert norms[1] == 0
    before = run.state()
    norm = clip_grad_norm_(parameters, 1.0, norms=norms)
    run.guard.update_found_inf(2, loss=torch.tensor(1.0), norms=norms, grad_norm=norm)
    run.optimizer.step()
    assert not run.guard.should_stop()
    changed = [not torch.equal(a, b) for a, b in zip(before, run.state(), strict=True)]
    assert changed == [True] * 4 + [False] * 4 + [True] * 4
