"""Optimizers outside: which part of their contract they break, and how their state is saved."""

import sys
from copy import deepcopy
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn as nn

from checkpoint.states import OptimizerState
from config import ConfigError
from config.job_config import LrScheduler, Optimizer
from optim.optimizer import build_optimizer
from optim.outside import Trial, find_problem, outside_optimizer
from optim.schedule import build_lr_schedule

CPU = torch.device("cpu")


class Plain(torch.optim.Optimizer):
    """Gradient descent; subclasses change its one line."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - group["lr"] * group["weight_decay"])
                self.update(p, group)

    def update(self, p: Any, group: dict[str, Any]) -> None:
        p.sub_(group["lr"] * p.grad)


class NumberInState(Plain):
    def update(self, p: Any, group: dict[str, Any]) -> None:
        state = self.state[p]
        state["step"] = state.get("step", 0) + 1
        state["mean"] = state.get("mean", 0.0) / 2 + 1.5
        p.sub_(group["lr"] / state["step"] / state["mean"] * p.grad)


class OnlyNumberInGroup(Plain):
    def update(self, p: Any, group: dict[str, Any]) -> None:
        group["step"] = group.get("step", 0) + 1
        p.sub_(group["lr"] / group["step"] * p.grad)


class NumberInGroup(Plain):
    def update(self, p: Any, group: dict[str, Any]) -> None:
        group["step"] = group.get("step", 0) + 1
        self.state[p]["last"] = group["step"]
        p.sub_(group["lr"] / group["step"] * p.grad)


class NumberOutside(Plain):
    def update(self, p: Any, group: dict[str, Any]) -> None:
        p.sub_(group["lr"] / self.count * p.grad)


class ChangesOption(Plain):
    def update(self, p: Any, group: dict[str, Any]) -> None:
        group["weight_decay"] *= 0.5
        super().update(p, group)


class ListInState(Plain):
    def update(self, p: Any, group: dict[str, Any]) -> None:
        self.state[p]["history"] = [1.0]
        super().update(p, group)


class Lookahead(Plain):
    """Averages with slow weights, which begin at its fifth step."""

    def update(self, p: Any, group: dict[str, Any]) -> None:
        super().update(p, group)
        state = self.state[p]
        state["step"] = state.get("step", 0) + 1
        if state["step"] % 5 == 0:
            slow = state.setdefault("slow", p.clone())
            p.copy_(slow.lerp_(p, 0.5))


class IntegerAtFirst(Plain):
    def update(self, p: Any, group: dict[str, Any]) -> None:
        group["peak"] = max(group.get("peak", 0), group["lr"])
        p.sub_(group["lr"] / (1 + group["peak"]) * p.grad)


class Normalized(Plain):
    def update(self, p: Any, group: dict[str, Any]) -> None:
        p.sub_(group["lr"] * p.grad / (p.grad.norm() + 1e-8))


class IgnoresLr(Plain):
    def update(self, p: Any, group: dict[str, Any]) -> None:
        p.sub_(0.01 * p.grad)


class IgnoresDecay(Plain):
    def update(self, p: Any, group: dict[str, Any]) -> None:
        p.div_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * p.grad)


class DecaysWithoutLr(Plain):
    def update(self, p: Any, group: dict[str, Any]) -> None:
        p.mul_(1 - group["weight_decay"]).sub_(group["lr"] * p.grad)


class AssignsData(Plain):
    def update(self, p: Any, group: dict[str, Any]) -> None:
        p.data = p.data - group["lr"] * p.grad


class Random(Plain):
    def update(self, p: Any, group: dict[str, Any]) -> None:
        p.sub_(group["lr"] * p.grad * torch.rand_like(p))


class Idle(Plain):
    def update(self, p: Any, group: dict[str, Any]) -> None:
        p.div_(1 - group["lr"] * group["weight_decay"])


@pytest.fixture(autouse=True)
def zoo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Module with the classes of this file."""
    module = ModuleType("zoo")
    vars(module).update(globals())
    monkeypatch.setitem(sys.modules, "zoo", module)
    return module


def problem(name: str, *, must_be_elementwise: bool = True, **args: Any) -> str:
    build = outside_optimizer(Optimizer(name=name, args=args))
    trial = Trial(build, CPU, decays=True)
    return find_problem(trial, torch.float32, must_be_elementwise=must_be_elementwise)


@pytest.mark.parametrize(
    "name",
    [
        "zoo:Plain",
        "zoo:NumberInState",
        "zoo:NumberInGroup",
        "zoo:OnlyNumberInGroup",
        "torch.optim:Adam",
        "torch.optim:SGD",
    ],
)
def test_elementwise_optimizer_keeps_the_contract(name: str) -> None:
    assert problem(name) == ""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zoo:NumberOutside", "differs after its state was saved and loaded"),
        ("zoo:ChangesOption", "changes 'weight_decay' of its parameter groups"),
        ("zoo:ListInState", "has list in its state"),
        ("zoo:Lookahead", "has 'slow', which after its first step is absent and later a tensor in"),
        ("zoo:IntegerAtFirst", "has 'peak', which after its first step is int and later float"),
        ("zoo:Normalized", "does not update each element on its own"),
        ("torch.optim:Adafactor", "does not update each element on its own"),
        ("zoo:IgnoresLr", "changes weights|ignores the lr"),
        ("zoo:IgnoresDecay", "ignores the weight_decay"),
        ("zoo:DecaysWithoutLr", "changes weights with lr = 0"),
        ("zoo:AssignsData", "does not update weights in place"),
        ("zoo:Random", "is not deterministic"),
    ],
)
def test_broken_contract_is_named(name: str, message: str) -> None:
    found = problem(name)
    assert any(found.startswith(text) for text in message.split("|")), found


def test_other_optimizers_may_train_whole_weights() -> None:
    assert problem("zoo:Normalized", must_be_elementwise=False) == ""


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": "zoo:nn"}, "optimizer.name: 'zoo:nn' is not a torch"),
        ({"name": "zoo:Trial"}, "optimizer.name: 'zoo:Trial' is not a torch.optim.Optimizer"),
        ({"name": "zoo:build_lr_schedule"}, "'zoo:build_lr_schedule' has no argument lr"),
        ({"name": "torch.optim:Rprop"}, "optimizer.weight_decay: has no effect"),
        ({"args": {"lr": 1.0}}, "optimizer.args.lr: set optimizer.lr instead"),
        ({"args": {"betas": [0.9, "x"]}}, "optimizer.args.betas: .*valid number.*got"),
        ({"args": {"amsgard": True}}, "optimizer.args.amsgard: .*did you mean amsgrad"),
        ({"args": {"eps": float("nan")}}, "optimizer.args.eps: must be a finite number"),
    ],
)
def test_mistake_is_an_error_by_key(keys: dict[str, Any], message: str) -> None:
    section = Optimizer.model_construct(**{**Optimizer().model_dump(), "name": "torch.optim:AdamW"})
    with pytest.raises(ValueError, match=message):
        outside_optimizer(section.model_copy(update=keys))


@pytest.mark.parametrize(
    "name", ["zoo:NumberInState", "zoo:NumberInGroup", "zoo:OnlyNumberInGroup"]
)
def test_numbers_are_saved_and_loaded(name: str) -> None:
    models = [nn.Linear(3, 2) for _ in range(2)]
    optimizers = [build_optimizer(m, Optimizer(name=name)) for m in models]
    states = [OptimizerState(m, o) for m, o in zip(models, optimizers, strict=True)]
    for _ in range(3):
        models[0](torch.ones(1, 3)).sum().backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
    saved = states[0].state_dict()
    assert saved
    assert all(isinstance(value, torch.Tensor) for value in saved.values())
    assert states[1].load_targets(saved).keys() == saved.keys()
    states[1].load_state_dict(saved)
    assert [*optimizers[1].state.values()] == [*optimizers[0].state.values()]
    steps = [[group.get("step") for group in o.param_groups] for o in optimizers]
    assert steps[0] == steps[1]


@pytest.mark.parametrize("name", ["torch.optim:AdamW", "zoo:NumberInGroup"])
def test_saving_before_the_first_update_makes_no_step(name: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = build_optimizer(model, Optimizer(name=name))
    before = deepcopy(optimizer.state_dict())
    state = OptimizerState(model, optimizer)
    assert state.state_dict() == {}
    assert optimizer.state_dict() == before
    # Loading it undoes the updates since.
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert state.load_targets(set()) == {}
    state.load_state_dict({})
    assert optimizer.state_dict() == before


def test_idle_optimizer_is_rejected_when_it_is_built() -> None:
    with pytest.raises(ConfigError, match="'zoo:Idle' does not change the weights"):
        build_optimizer(nn.Linear(3, 2), Optimizer(name="zoo:Idle"))


def schedule(function: Any, zoo: ModuleType, **keys: Any) -> list[float]:
    zoo.factor = function  # type: ignore[attr-defined]
    factor = build_lr_schedule(LrScheduler(decay_type="zoo:factor", **keys), 4)
    return [factor(step) for step in range(1, 5)]


def test_schedule_gets_the_keys_that_it_names(zoo: ModuleType) -> None:
    def factor(step: int, total: int, min_lr_factor: float, power: float = 1.0) -> float:
        return max(min_lr_factor, (1 - step / total) ** power)

    found = schedule(factor, zoo, min_lr_factor=0.2, args={"power": 2})
    assert found == [0.5625, 0.25, 0.2, 0.2]


@pytest.mark.parametrize(
    ("function", "keys", "message"),
    [
        (lambda step: 1.0, {}, "lr_scheduler.decay_type: 'zoo:factor' takes 1 arguments, not 2"),
        (lambda step, total: step / 0, {}, "at step 1: ZeroDivisionError"),
        (lambda step, total: 2.0 - step, {}, "at step 3: -1.0 is not a factor of 0 or more"),
        (lambda step, total: float("nan"), {}, "at step 1: nan is not a factor"),
        (lambda step, total: None, {}, "at step 1: None is not a factor"),
        (lambda step, total, seen=[]: seen.append(1) or len(seen), {}, "gives 4.0 and then 5.0"),
        (lambda step, total: 1.0, {"warmup_steps": 5}, "lr_scheduler.warmup_steps: has no effect"),
        (lambda step, total: 1.0, {"args": {"x": 1}}, "lr_scheduler.args.x: zoo:factor has no"),
        (lambda step, total, x: 1.0, {}, "lr_scheduler.args.x: must be set"),
    ],
)
def test_schedule_that_cannot_be_one_is_an_error(
    zoo: ModuleType, function: Any, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        schedule(function, zoo, **keys)
