"""LocalAdamW: the bits of PyTorch's AdamW on DTensors, by a kernel that gets none."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from config.job_config import Optimizer
from optim.local_adamw import LocalAdamW
from optim.optimizer import build_optimizer
from parallelisms.materialize import materialize
from tests.lib.layouts import (
    CPU,
    MODE,
    REPLICATE,
    TP,
    Layout,
    digest,
    on_shards,
    shard_debugmodel,
    small_args,
)
from tests.lib.ranks import RankPool

STEPS = 3


def digests(layout: Layout, step: Callable[[Any], None]) -> dict[str, str]:
    """Digests of weights and states after updates by ``step``, the last of which is skipped."""
    model = shard_debugmodel("qwen3", small_args("qwen3", "debugmodel"), layout).module
    materialize(model, CPU, seed=3)
    optimizer = build_optimizer(model, Optimizer(lr=1e-2))
    assert type(optimizer) is LocalAdamW
    for number in range(STEPS):
        for weight in model.parameters():
            weight.grad = on_shards(lambda x, n=number: x * (n - 0.5) + x.square(), weight)
        if number == STEPS - 1:
            optimizer.found_inf = torch.ones(())
        step(optimizer)
    states = {fqn: optimizer.state[p] | {"weight": p} for fqn, p in model.named_parameters()}
    return {f"{fqn}.{name}": digest(t) for fqn, s in states.items() for name, t in s.items()}


def compare(layout: Layout) -> tuple[dict[str, str], dict[str, str]]:
    def update(weights: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        assert not any(isinstance(weight, DTensor) for weight in weights)
        adamw(weights, *args, **kwargs)

    with patch("optim.local_adamw.adamw", update):
        found = digests(layout, LocalAdamW.step)
    return found, digests(layout, torch.optim.AdamW.step)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(1),
        Layout(3),
        Layout(2, {MODE: "ddp"}),
        Layout(4, {TP: 2, REPLICATE: 2}),
    ],
    ids=str,
)
def test_update_is_bitwise_that_of_dtensors(ranks: RankPool, layout: Layout) -> None:
    for found, want in ranks.run(compare, layout.world_size, layout):
        assert found == want
