"""Optimizers from outside of this repository, and the contract that they must keep.

On a mesh an optimizer gets DTensors, of which each rank updates its shard. That gives the weights
of one device only if every element is updated on its own. Checkpoints hold the tensors and numbers
in ``optimizer.state``, and numbers that steps add to the parameter groups. ``find_problem`` tries
all of this on small weights before the first step.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from config import ConfigError
from config.job_config import Optimizer
from runtime.dtensor import is_sharded, to_local
from runtime.outside import Signature, describe_error, import_attribute

Group = dict[str, Any]
Build = Callable[[list[Group], float], torch.optim.Optimizer]
SET_BY = {
    "lr": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
}
STEPS, LR, DECAY = 4, 0.01, 0.1
# What an optimizer does every few steps has happened by then.
STATE_STEPS = 50
# Relative error of float32 updates. An optimizer that reads other elements is off by much more.
TOLERANCE = 1e-3


def outside_optimizer(config: Optimizer) -> Build:
    """Import ``optimizer.name`` and bind its arguments; return what builds it from groups and lr.

    Raises ``ValueError`` by key.
    """
    name, key = config.name, "optimizer.name"
    function = import_attribute(key, name)
    is_other_class = isinstance(function, type) and not issubclass(function, torch.optim.Optimizer)
    if not callable(function) or is_other_class:
        raise ValueError(f"{key}: {name!r} is not a torch.optim.Optimizer, nor returns one")
    signature = Signature(key, name, function, n_leading=1)
    if not signature.takes("lr"):
        raise ValueError(f"{key}: {name!r} has no argument lr")
    if not signature.takes("weight_decay") and config.weight_decay > 0:
        text = f"has no effect, because {name} has no such argument: set it to 0"
        raise ValueError(f"optimizer.weight_decay: {text}")
    arguments = {"lr": config.lr} | signature.bind("optimizer.args", config.args, set_by=SET_BY)
    decays = signature.takes("weight_decay")
    if decays:
        # Each group has its own; a signature may need one for the others.
        arguments["weight_decay"] = config.weight_decay

    def build(groups: list[Group], lr: float) -> torch.optim.Optimizer:
        unknown = set() if decays else {"weight_decay"}
        # Copies, because PyTorch keeps and changes them.
        own = [{key: v for key, v in g.items() if key not in unknown} for g in groups]
        try:
            optimizer = function(own, **arguments | {"lr": lr})
        except Exception as error:
            raise ConfigError([f"{key}: {name!r}: {describe_error(error)}"]) from error
        if not isinstance(optimizer, torch.optim.Optimizer):
            kind = type(optimizer).__name__
            raise ConfigError([f"{key}: {name!r} returns {kind}, not a torch.optim.Optimizer"])
        return optimizer

    return build


def build_outside(
    config: Optimizer, groups: list[Group], *, has_stages: bool
) -> torch.optim.Optimizer:
    """Build the optimizer that ``optimizer.name`` names, after it has kept the contract.

    ``has_stages``: other ranks have other layers. Raises ``ConfigError``.
    """
    build = outside_optimizer(config)
    parameters = [parameter for group in groups for parameter in group["params"]]
    local = to_local(parameters[0])
    dtype = local.dtype
    is_split = has_stages or any(map(_is_split, parameters))
    trial = Trial(build, local.device, decays=config.weight_decay > 0)
    try:
        problem = find_problem(trial, dtype, must_be_elementwise=is_split)
        problem = problem or _problem_on_mesh(build(groups, config.lr), parameters)
    except ConfigError:
        raise
    except Exception as error:
        problem = f"cannot update weights: {describe_error(error)}"
    if problem:
        raise ConfigError(
            [f"optimizer.name: {config.name!r} {problem}; see docs/howto/own_optimizer.md"]
        )
    return build(groups, config.lr)


@dataclass
class SmallWeights:
    """A matrix that decays and a vector that does not, each whole or in pieces."""

    pieces: list[list[nn.Parameter]]
    optimizers: list[torch.optim.Optimizer]
    """One for all, or one for each piece."""

    def step(self, number: int) -> None:
        """Make a step; its gradients depend on ``number``, and are zeros for 0."""
        for parts, whole in zip(self.pieces, _tensors(number), strict=True):
            gradients = _cut(whole * _scales(whole) if number else whole * 0, len(parts))
            for part, gradient in zip(parts, gradients, strict=True):
                part.grad = gradient.to(part)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def set_lr(self, lr: float) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr

    @property
    def addresses(self) -> list[int]:
        return [part.data_ptr() for parts in self.pieces for part in parts]

    @property
    def values(self) -> list[torch.Tensor]:
        wholes = zip(_tensors(0), self.pieces, strict=True)
        return [_join(whole, [p.detach().clone() for p in parts]) for whole, parts in wholes]


@dataclass(frozen=True)
class Trial:
    """Steps of an optimizer on small weights."""

    build: Build
    device: torch.device
    decays: bool

    def start(self, dtype: torch.dtype, *, decay: float = DECAY, cut: bool = False) -> SmallWeights:
        """Return new weights. ``cut``: in pieces, each with an optimizer of its own."""
        groups: list[Group] = []
        for index, whole in enumerate(_tensors(0)):
            parts = [nn.Parameter(p.to(self.device, dtype)) for p in _cut(whole, 2 if cut else 1)]
            decays = self.decays and index == 0
            groups.append({"params": parts, "weight_decay": decay if decays else 0.0})
        pieces = [group["params"] for group in groups]
        if not cut:
            return SmallWeights(pieces, [self.build(groups, LR)])
        alone = [[group | {"params": [part]}] for group in groups for part in group["params"]]
        return SmallWeights(pieces, [self.build(own, LR) for own in alone])

    def run(
        self,
        dtype: torch.dtype = torch.float32,
        *,
        lr: float = LR,
        resumes: bool = False,
        **options: Any,
    ) -> list[torch.Tensor]:
        """Return the weights after ``STEPS``; if it ``resumes``, another object makes the last."""
        weights = self.start(dtype, **options)
        for number in range(1, STEPS + 1):
            if resumes and number == STEPS // 2 + 1:
                others = self.start(dtype, **options)
                state = weights.optimizers[0].state_dict()
                for parts, saved in zip(others.pieces, weights.pieces, strict=True):
                    parts[0].data.copy_(saved[0].data)
                others.optimizers[0].load_state_dict(state)
                weights = others
            weights.set_lr(lr)
            weights.step(number)
        return weights.values


def find_problem(trial: Trial, dtype: torch.dtype, *, must_be_elementwise: bool) -> str:
    """Return which part of the contract an optimizer breaks; "" if none. ``dtype``: of weights."""
    problem = _problem_with_state(trial.start(dtype))
    if problem:
        return problem
    first, whole = trial.start(torch.float32).values, trial.run()
    if _differ(whole, trial.run()):
        return "is not deterministic"
    if not _differ(whole, first):
        return "does not change the weights that it is given"
    undecayed = trial.run(decay=0.0)
    if not _differ(undecayed, trial.run(decay=0.0, lr=LR / 2)):
        return "ignores the lr of its parameter groups, which the schedule sets"
    if trial.decays:
        matrix, vector = zip(whole, undecayed, strict=True)
        if torch.equal(*matrix) or not torch.equal(*vector):
            return "ignores the weight_decay of its parameter groups"
    if _differ(trial.run(dtype), trial.run(dtype, resumes=True)):
        text = "differs after its state was saved and loaded"
        return f"{text}: keep all of it in optimizer.state, in the dtype of the weights"
    if must_be_elementwise and not _are_close(whole, trial.run(cut=True), since=first):
        text = "does not update each element on its own, so it would not be exact on this mesh"
        return f'{text}: train on one rank, or with parallelism.data_parallel = "ddp" alone'
    return ""


def _problem_with_state(weights: SmallWeights) -> str:
    """Return why a checkpoint cannot hold the optimizer's state; "" if it can. Mutates both."""
    optimizer, before = weights.optimizers[0], weights.values
    options = [dict(group) for group in optimizer.param_groups]
    if len(options) != len(weights.pieces):
        return "must keep the parameter groups that it is given"
    addresses, are_kept = weights.addresses, True
    weights.set_lr(0.0)
    weights.step(0)
    if _differ(before, weights.values):
        return "changes weights with lr = 0 and gradients of 0, a step that is made before loading"
    first = _kinds(optimizer)
    weights.set_lr(LR)
    for number in range(1, STATE_STEPS + 1):
        weights.step(number)
        are_kept = are_kept and weights.addresses == addresses
    if not are_kept:
        # Assigned to the data of a DTensor, they would be lost.
        return "does not update weights in place, as parameter.copy_(values) does"
    values = [value for state in optimizer.state.values() for value in state.values()]
    others = [type(v).__name__ for v in values if not isinstance(v, torch.Tensor | int | float)]
    if others:
        return f"has {others[0]} in its state: checkpoints hold tensors and numbers"
    for old, group in zip(options, optimizer.param_groups, strict=True):
        changed = [k for k in old if k not in ("lr", "params") and group.get(k) != old[k]]
        if changed:
            return f"changes {changed[0]!r} of its parameter groups, which checkpoints do not hold"
    last = _kinds(optimizer)
    if later := [name for name in sorted(first | last) if first.get(name) != last.get(name)]:
        was, now = (kinds.get(later[0], "absent") for kinds in (first, last))
        text = f"has {later[0]!r}, which after its first step is {was} and later {now}"
        return f"{text}; checkpoints hold what the first step makes"
    return ""


def _kinds(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Types of what is in the state or in the parameter groups, by name."""
    found: dict[str, set[str]] = defaultdict(set)
    for values in (*optimizer.state.values(), *optimizer.param_groups):
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                size = "a number" if value.ndim == 0 else "a tensor"
                found[name].add(f"{size} in {value.dtype}")
            elif isinstance(value, int | float):
                found[name].add(type(value).__name__)
    return {name: " and ".join(sorted(kinds)) for name, kinds in found.items()}


def _problem_on_mesh(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> str:
    """Return why an optimizer cannot hold the state of DTensors; "" if it can. It has no state yet.

    Makes a step with gradients of 0, which changes no weight.
    """
    dtensors = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    if not dtensors:
        return ""
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for parameter in dtensors:
        for name, value in optimizer.state[parameter].items():
            is_alike = isinstance(value, DTensor) and value.placements == parameter.placements
            if isinstance(value, torch.Tensor) and value.numel() > 1 and not is_alike:
                return f"has a state {name!r} that is not sharded like its parameter"
    return ""


def _is_split(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, DTensor) and any(
        is_sharded(placement) and parameter.device_mesh.size(dim) > 1
        for dim, placement in enumerate(parameter.placements)
    )


def _tensors(number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(size, generator=generator) for size in ((6, 4), (6,))]


def _scales(whole: torch.Tensor) -> torch.Tensor:
    """Powers of ten that differ between any two pieces."""
    return 10.0 ** torch.arange(whole.numel()).view(whole.shape).fmod(5).sub(2)


def _cut(whole: torch.Tensor, pieces: int) -> list[torch.Tensor]:
    """Cut every dimension into pieces if there is more than one."""
    parts = [whole]
    for dim in range(whole.ndim if pieces > 1 else 0):
        parts = [half for part in parts for half in part.tensor_split(2, dim)]
    return [part.clone(memory_format=torch.contiguous_format) for part in parts]


def _join(whole: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
    for dim in reversed(range(whole.ndim if len(parts) > 1 else 0)):
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [torch.cat(pair, dim) for pair in pairs]
    return parts[0]


def _differ(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return not all(map(torch.equal, one, other))


def _are_close(
    want: list[torch.Tensor], got: list[torch.Tensor], since: list[torch.Tensor]
) -> bool:
    """True if two results differ by little of what changed ``since``."""
    return all(
        (w - g).norm() <= TOLERANCE * (w - first).norm()
        for w, g, first in zip(want, got, since, strict=True)
    )
