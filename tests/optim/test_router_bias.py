"""The expert load is equal on all ranks, also on a pipeline stage without experts."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from config.job_config import Parallelism
from optim.router_bias import ExpertBalancer
from parallelisms.parallel_dims import ParallelDims
from tests.lib.ranks import RankPool


def moe_layer(*tokens_per_expert: float) -> Any:
    return SimpleNamespace(
        tokens_per_expert=torch.tensor(tokens_per_expert),
        bias=torch.zeros(len(tokens_per_expert)),
        balance_weight=0.25,
    )


def update_and_read_metric() -> tuple[dict[str, float], list[list[float]]]:
    """Two pipeline stages, the first with dense layers only."""
    dims = ParallelDims.build(Parallelism(pipeline_parallel_degree=2), 2, "cpu")
    moes = [moe_layer(1.0, 2.0, 9.0), moe_layer(4.0, 4.0, 4.0)] if dist.get_rank() == 1 else []
    updater = ExpertBalancer(moes, dims.data_mesh, rate=0.5, device=torch.device("cpu"))
    updater.set_batch_fraction(0.5)
    loads = [moe.tokens_per_expert.clone() for moe in moes]
    # A masked update moves no bias.
    updater.update(torch.ones(()))
    for moe, tokens_per_expert in zip(moes, loads, strict=True):
        assert not moe.bias.any()
        moe.tokens_per_expert.copy_(tokens_per_expert)
    updater.update(torch.zeros(()))
    assert all(moe.balance_weight == 0.5 and not moe.tokens_per_expert.any() for moe in moes)
    return updater.max_load_ratio(), [moe.bias.tolist() for moe in moes]


def update_above_frozen_layers() -> dict[str, float]:
    """Backward does not reach the first layer, so that it counts no tokens."""
    dims = ParallelDims.build(Parallelism(), 1, "cpu")
    moes = [moe_layer(0.0, 0.0), moe_layer(3.0, 1.0)]
    updater = ExpertBalancer(moes, dims.data_mesh, rate=0.5, device=torch.device("cpu"))
    updater.update(torch.zeros(()))
    assert not moes[0].bias.any()
    return updater.max_load_ratio()


def test_layers_without_counts_are_left_out(ranks: RankPool) -> None:
    assert ranks.run(update_above_frozen_layers, 1) == [{"expert_load": 1.5}]


def test_max_load_ratio_is_equal_on_all_pipeline_stages(ranks: RankPool) -> None:
    (first, _), (second, biases) = ranks.run(update_and_read_metric, 2)
    assert first == second == {"expert_load": 9.0 / 4.0}
    assert biases == [[0.5, 0.5, -0.5], [0.0, 0.0, 0.0]]
