"""The load of experts is one value for all ranks, also where a stage has none."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from config.job_config import Parallelism
from optim.expert_balance import ExpertBalance
from parallelisms.parallel_dims import ParallelDims
from tests.ranks import RankPool


def layer(*load: float) -> Any:
    return SimpleNamespace(
        load=torch.tensor(load), bias=torch.zeros(len(load)), balance_weight=0.25
    )


def look_after_a_step() -> tuple[dict[str, float], list[list[float]]]:
    """Two stages, of which the first has dense layers alone."""
    dims = ParallelDims.build(Parallelism(pipeline_parallel_degree=2), 2, "cpu")
    moes = [layer(1.0, 2.0, 9.0), layer(4.0, 4.0, 4.0)] if dist.get_rank() == 1 else []
    balance = ExpertBalance(moes, dims.data_mesh, rate=0.5, device=torch.device("cpu"))
    balance.begin_step(0.5)
    loads = [moe.load.clone() for moe in moes]
    # An update that is masked moves no bias either.
    balance.finish_step(torch.ones(()))
    for moe, load in zip(moes, loads, strict=True):
        assert not moe.bias.any()
        moe.load.copy_(load)
    balance.finish_step(torch.zeros(()))
    assert all(moe.balance_weight == 0.5 and not moe.load.any() for moe in moes)
    return balance.look(), [moe.bias.tolist() for moe in moes]


def test_a_stage_without_experts_tells_what_the_others_have(ranks: RankPool) -> None:
    (first, _), (second, biases) = ranks.run(look_after_a_step, 2)
    assert first == second == {"expert_load": 9.0 / 4.0}
    assert biases == [[0.5, 0.5, -0.5], [0.0, 0.0, 0.0]]
