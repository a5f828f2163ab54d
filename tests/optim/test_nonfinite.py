"""Updates pass or are left out, bit for bit, and the host learns of it when it looks."""

import json
import logging
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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

ONE_RANK = cast(Any, SimpleNamespace(shape=(1, 1)))
GOOD, BAD = 1.0, math.nan
SKIP = Numerics(on_nonfinite="skip", max_skipped=3)


class Small:
    """Three weights, their optimizer and its guard; gradients that are a function of the step."""

    def __init__(self, config: Numerics = SKIP, *, kind: type[torch.optim.AdamW] = AdamW) -> None:
        generator = torch.Generator().manual_seed(0)
        weights = {name: torch.randn(4, 3, generator=generator) for name in ("wq", "wk", "wv")}
        self.parameters = {name: nn.Parameter(weight) for name, weight in weights.items()}
        self.optimizer = kind(self.parameters.values(), fused=True)
        self.guard = NonfiniteGuard(
            self.optimizer,
            self.parameters,
            # The first one is on another stage.
            fqns=["tok_embeddings", *self.parameters],
            weight_mesh=ONE_RANK,
            config=config,
        )

    def step(self, step: int, loss: float = 1.0, **gradients: float) -> None:
        """``gradients``: an element of the gradient by weight's name."""
        generator = torch.Generator().manual_seed(step)
        for name, parameter in self.parameters.items():
            parameter.grad = torch.randn(4, 3, generator=generator)
            parameter.grad[1, 2] = gradients.get(name, 0.5)
        parameters = list(self.parameters.values())
        norms = local_norms(parameters)
        norm = clip_grad_norm_(parameters, 1.0, norms=norms)
        self.guard.check(step, loss=torch.tensor(loss), norms=norms, grad_norm=norm)
        self.optimizer.step()

    def state(self) -> list[torch.Tensor]:
        tensors = []
        for parameter in self.parameters.values():
            state = self.optimizer.state[parameter]
            tensors += [parameter.detach().clone(), *(state[k].clone() for k in sorted(state))]
        return tensors


def is_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@contextmanager
def told() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize("kind", [AdamW, ChunkedAdamW])
@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["loss", "wq", "wv"])
def test_a_bad_step_leaves_everything_as_it_was(
    place: str, fault: float, kind: type[AdamW]
) -> None:
    small, twin = Small(kind=kind), Small(kind=kind)
    for step in (1, 2):
        small.step(step)
        twin.step(step)
    before = small.state()
    small.step(3, **{place: fault})
    assert is_equal(small.state(), before)
    small.step(4)
    twin.step(4)
    assert is_equal(small.state(), twin.state())
    assert not is_equal(small.state(), before)


def test_a_good_step_is_the_optimizers() -> None:
    small, plain = Small(), Small()
    del plain.optimizer.found_inf  # type: ignore[attr-defined]
    for step in (1, 2, 3):
        small.step(step)
        plain.step(step)
    assert is_equal(small.state(), plain.state())


def test_an_optimizer_that_would_not_obey_is_refused() -> None:
    small = Small()
    deaf = AdamW(small.parameters.values(), foreach=True)
    with pytest.raises(AssertionError, match="no effect"):
        NonfiniteGuard(deaf, small.parameters, fqns=[], weight_mesh=ONE_RANK, config=SKIP)


def test_the_first_step_may_be_bad() -> None:
    small, twin = Small(), Small()
    small.step(1, wk=BAD)
    small.step(2)
    twin.step(2)
    assert is_equal(small.state(), twin.state())


def test_without_the_guard_all_weights_are_lost() -> None:
    small = Small()
    small.step(1)
    with patch.object(small.guard, "_mask", lambda step, place: None):
        small.step(2, wk=BAD)
    assert all(weight.isnan().any() for weight in small.parameters.values())


def test_stop_leaves_out_all_that_follows() -> None:
    small = Small(Numerics(on_nonfinite="stop"))
    small.step(1)
    assert not small.guard.look()
    before = small.state()
    small.step(2, wk=BAD)
    small.step(3)
    small.step(4)
    assert is_equal(small.state(), before)
    assert small.guard.look()


@pytest.mark.parametrize(
    ("losses", "is_over"),
    [
        ([BAD, BAD, GOOD, BAD, BAD, GOOD], False),
        ([GOOD, BAD, BAD, BAD], True),
        # The host looks after a good one.
        ([BAD, BAD, BAD, GOOD, GOOD], True),
    ],
)
def test_too_many_in_a_row_end_the_run(losses: list[float], is_over: bool) -> None:
    small = Small()
    for step, loss in enumerate(losses, 1):
        small.step(step, loss)
    assert small.guard.look() == is_over


def test_what_follows_too_many_is_left_out_too() -> None:
    small = Small()
    small.step(1)
    before = small.state()
    for step, loss in enumerate([BAD, BAD, BAD, GOOD], 2):
        small.step(step, loss)
    assert is_equal(small.state(), before)


def test_the_first_is_named_with_its_step() -> None:
    small = Small()
    with told() as lines:
        small.step(1)
        small.guard.look()
        small.step(2, wv=math.inf, wk=math.nan)
        small.step(3, wq=math.nan)
        small.step(4)
        small.guard.look()
        small.guard.look()
        small.step(5, BAD, wq=math.nan)
        small.guard.look()
    start = [line.partition(" is not finite")[0] for line in lines]
    assert start == ["step 2: the gradient of wk", "step 5: the loss"]
    assert "2 updates skipped since, 2 in all" in lines[0]
    assert "1 updates skipped since, 3 in all" in lines[1]
    assert small.guard.skipped == 3


def test_a_norm_that_overflows_is_not_finite() -> None:
    """Each gradient has a norm, and their sum of squares has none."""
    small = Small()
    before = small.state()
    with told() as lines:
        small.step(1, wq=1.5e19, wk=1.5e19, wv=1.5e19)
        small.guard.look()
    assert is_equal(small.state()[:1], before[:1])
    assert "the gradient norm, but no gradient, is not finite" in lines[0]


def test_counters_survive_a_checkpoint() -> None:
    straight, resumed = Small(), Small()
    losses = [BAD, GOOD, BAD, BAD, BAD]
    for step, loss in enumerate(losses[:4], 1):
        straight.step(step, loss)
    state = json.loads(json.dumps(straight.guard.state_dict()))
    assert state == {"skipped": 3, "in_a_row": 2}
    resumed.guard.load_state_dict(state)
    assert resumed.guard.skipped == 3
    assert not resumed.guard.look()
    for small in (straight, resumed):
        small.step(5, losses[4])
        assert small.guard.look()
        assert small.guard.state_dict() == {"skipped": 4, "in_a_row": 3}


def test_loading_a_state_lets_updates_pass_again() -> None:
    """A run that goes back to its checkpoint goes back with its guard."""
    small = Small(Numerics(on_nonfinite="stop"))
    saved = small.guard.state_dict()
    small.step(1, BAD)
    assert small.guard.look()
    small.guard.load_state_dict(saved)
    before = small.state()
    small.step(2)
    assert not small.guard.look()
    assert not is_equal(small.state()[:1], before[:1])


def waiting(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("the host waits for the device")


@contextmanager
def no_waiting() -> Iterator[None]:
    with ExitStack() as stack:
        for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy"):
            stack.enter_context(patch.object(torch.Tensor, name, waiting))
        yield


def test_the_host_does_not_wait() -> None:
    small = Small()
    with no_waiting():
        small.step(1)
        small.step(2, wk=BAD)
    for look in (small.guard.look, small.guard.state_dict):
        with no_waiting(), pytest.raises(AssertionError, match="waits"):
            look()


def test_a_weight_without_a_gradient_is_no_fault() -> None:
    small = Small()
    small.step(1)
    small.parameters["wk"].grad = None
    parameters = list(small.parameters.values())
    norms = local_norms(parameters)
    assert norms[1] == 0
    before = small.state()
    norm = clip_grad_norm_(parameters, 1.0, norms=norms)
    small.guard.check(2, loss=torch.tensor(1.0), norms=norms, grad_norm=norm)
    small.optimizer.step()
    assert not small.guard.look()
    changed = [not torch.equal(a, b) for a, b in zip(before, small.state(), strict=True)]
    assert changed == [True] * 4 + [False] * 4 + [True] * 4
