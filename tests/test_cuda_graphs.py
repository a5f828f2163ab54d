"""Captured microbatches: equal to eager ones bit for bit, whatever changes between steps."""

import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch

from build_model import ShardedModel
from config import ConfigError, JobConfig
from config.job_config import ActivationCheckpoint, Compile, Float8, Optimizer
from cuda_graphs import CudaGraphPool, Inputs, MicrobatchGraphs, UpdateGraph
from data.step_batches import StepBatch
from parallelisms.constraints import check_constraints
from parallelisms.materialize import materialize
from tests.lib.layouts import (
    CP,
    CPU,
    METHOD,
    MODE,
    REDUCE,
    REPLICATE,
    RESHARD,
    SEQ_LEN,
    TP,
    Layout,
    args_of,
    digest,
    shard_debugmodel,
)
from tests.lib.marks import slow
from tests.lib.op_recorder import OpRecorder, as_on_devices
from tests.lib.parity import global_batch, rows_of
from tests.lib.ranks import RankError, RankPool
from train_step import TrainStep

# Number of microbatches of each step: kinds of steps repeat, change and return. The last step
# replays the graphs of the one before it, with another number of microbatches.
STEPS = (3, 1, 1, 2, 2, 3, 4)
LR = 1e-3
FULL = ActivationCheckpoint(mode="full")
SELECTIVE = ActivationCheckpoint(mode="selective")
LAYOUTS = [
    slow(Layout(1)),
    Layout(1, recompute=FULL),
    slow(Layout(2)),
    Layout(2, {RESHARD: "always"}, recompute=SELECTIVE),
    slow(Layout(2, {RESHARD: "never"})),
    Layout(2, {MODE: "simple_fsdp"}, recompute=FULL),
    Layout(2, {TP: 2}),
    Layout(2, {CP: 2, METHOD: "ulysses"}),
    slow(Layout(2, {CP: 2, METHOD: "allgather"})),
    Layout(2, {REPLICATE: 2}, recompute=FULL),
    Layout(4, {REPLICATE: 2, REDUCE: "last_microbatch"}),
    Layout(2, float8=Float8(recipe="tensorwise", emulate=True, skip_small=False)),
]


def train(
    model: str,
    layout: Layout,
    pool: Callable[[], Any],
    *,
    documents: bool,
    device: torch.device = CPU,
) -> list[Any]:
    """Losses, norms, and digests of the weights after STEPS. Collective."""
    train_step = build(model, layout, pool, device)
    batch = global_batch(train_step.model.args.vocab_size, documents)
    found: list[Any] = []
    for step, count in enumerate(STEPS):
        rows = [(step + index) % len(batch.tokens) for index in range(count)]
        microbatches = [rows_of(batch, slice(row, row + 1)) for row in rows]
        # Before a step that is captured, and before one that is only replayed.
        if step in (5, 6):
            found += train_step.runner.evaluate(microbatches).tolist()
        # As if other ranks had other numbers of tokens in each step.
        n_tokens = SEQ_LEN * count + step
        result = train_step(
            step + 1, StepBatch(microbatches, 0.0, count, n_tokens, is_end_of_data=False)
        )
        found += [*result.losses.tolist(), result.grad_norm.item(), result.lr]
    return [*found, *(digest(p.detach().cpu()) for p in train_step.model.module.parameters())]


def build(model: str, layout: Layout, pool: Callable[[], Any], device: torch.device) -> TrainStep:
    dtype = "float32" if layout.float8.recipe != "none" else "float64"
    sharded = shard_debugmodel(model, args_of(model), layout, dtype=dtype, device=device)
    materialize(sharded.module, device, seed=3)
    training = sharded.config.training.model_copy(update={"max_norm": 0.05})
    changes = {"optimizer": Optimizer(lr=LR), "training": training}
    config = sharded.config.model_copy(update=changes)
    run: Any = SimpleNamespace(
        config=config, global_batch_size=1, lr_factor=lambda step: 1 - step / 16
    )
    with patch.object(ShardedModel, "graph_pool", lambda _: pool()):
        return TrainStep(run, sharded)


def steps_after_loading() -> float:
    """Steps of a parameter's state that a rollback's checkpoint lacks, three steps after it."""
    train_step = build("llama3", Layout(1), OpRecorder, CPU)
    batch = rows_of(global_batch(train_step.model.args.vocab_size, False), slice(0, 1))
    parameter = next(train_step.model.module.parameters())
    with as_on_devices():
        for step in range(1, 6):
            if step == 3:
                train_step.optimizer.state[parameter].clear()
                train_step.reset_graphs()
            train_step(step, StepBatch([batch], 0.0, 1, SEQ_LEN, is_end_of_data=False))
    return train_step.optimizer.state[parameter]["step"].item()


def test_missing_state_is_made_once_after_a_rollback(ranks: RankPool) -> None:
    assert ranks.run(steps_after_loading, 1) == [3.0]


def compare(model: str, layout: Layout, documents: bool) -> None:
    pools: list[OpRecorder] = []

    def pool() -> OpRecorder:
        pools.append(OpRecorder())
        return pools[-1]

    want = train(model, layout, lambda: None, documents=documents)
    with as_on_devices():
        got = train(model, layout, pool, documents=documents)
    assert sum(each.n_captured for each in pools) > 100
    assert got == want


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_captured_steps_equal_eager_ones(ranks: RankPool, layout: Layout) -> None:
    ranks.run(compare, layout.world_size, "llama3", layout, False)


@pytest.mark.parametrize(("model", "world_size"), [("llama3", 2), ("qwen3", 1)])
def test_captured_documents_equal_eager_ones(ranks: RankPool, model: str, world_size: int) -> None:
    ranks.run(compare, world_size, model, Layout(world_size), True)


def reasons(changes: list[dict[str, dict[str, Any]]]) -> list[str]:
    sharded = shard_debugmodel("llama3", args_of("llama3"), Layout(1))
    found = []
    for change in changes:
        config = JobConfig.model_validate(change)
        model = replace(sharded, config=config, device=torch.device("cuda"))
        found.append(model.without_cuda_graphs)
    return found


UNSUPPORTED: dict[str, dict[str, dict[str, Any]]] = {
    "parallelism.fsdp_cpu_offload": {"parallelism": {"fsdp_cpu_offload": True}},
    "parallelism.fsdp_reshard_after_forward = N": {
        "parallelism": {"fsdp_reshard_after_forward": 2}
    },
    "debug.deterministic": {"debug": {"deterministic": "elastic"}},
    "metrics.straggler_window": {"metrics": {"straggler_window": 5}},
    "compiled recomputation of attention": {
        "compile": {"enable": True},
        "activation_checkpoint": {"mode": "full"},
    },
}


def test_what_runs_without_graphs_says_why(ranks: RankPool) -> None:
    wanted = UNSUPPORTED | {
        "": {},
        "compile.cuda_graphs": {"compile": {"cuda_graphs": "never"}},
        'models of your own: compile.cuda_graphs = "always"': {
            "model": {"name": "my:model"},
            "activation_checkpoint": {"mode": "none"},
        },
        'optimizers of your own: compile.cuda_graphs = "always"': {
            "optimizer": {"name": "my:optimizer"},
        },
    }
    (found,) = ranks.run(reasons, 1, list(wanted.values()))
    assert found == list(wanted)
    own = {"model": {"name": "my:model"}, "compile": {"cuda_graphs": "always"}}
    without = {"activation_checkpoint": {"mode": "none"}}
    assert ranks.run(reasons, 1, [own | without, own]) == [
        ["", "recomputation in a model of your own"]
    ]


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        *UNSUPPORTED.items(),
        ("pipeline parallel", {"parallelism": {"pipeline_parallel_degree": 2}}),
        ("ddp", {"parallelism": {"data_parallel": "ddp"}}),
        ("experts", {"model": {"name": "qwen3_moe"}}),
        ("recomputation in a model of your own", {"model": {"name": "my:model"}}),
    ],
)
def test_graphs_are_rejected_where_they_are_not_possible(
    reason: str, change: dict[str, dict[str, Any]]
) -> None:
    asked = {"compile": change.get("compile", {}) | {"cuda_graphs": "always"}}
    config = JobConfig.model_validate(change | asked)
    args = args_of(config.model.name if reason == "experts" else "llama3")
    with pytest.raises(ConfigError, match=re.escape(f"all of this run ({reason})")):
        check_constraints(config, args, 2, has_gpu=True)


def test_graphs_are_rejected_with_experts_that_only_the_model_shows(ranks: RankPool) -> None:
    layout = Layout(1, compile=Compile(cuda_graphs="always"))
    with pytest.raises(RankError, match=r"compile\.cuda_graphs: .*: the model has experts"):
        ranks.run(shard_debugmodel, 1, "qwen3_moe", args_of("qwen3_moe"), layout)


def test_graphs_of_several_gpus_can_be_asked_for() -> None:
    config = JobConfig.model_validate({"compile": {"cuda_graphs": "always"}})
    check_constraints(config, args_of("llama3"), 2, has_gpu=True)


GPU_LAYOUTS = [Layout(1), Layout(1, recompute=SELECTIVE), Layout(1, compile=Compile(enable=True))]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("layout", GPU_LAYOUTS, ids=str)
@pytest.mark.parametrize("documents", [False, True])
def test_cuda_graphs_equal_eager_steps(ranks: RankPool, layout: Layout, documents: bool) -> None:
    ranks.run(compare_on_gpu, 1, layout, documents)


def compare_on_gpu(layout: Layout, documents: bool) -> None:
    device = torch.device("cuda", 0)
    want, got = (
        train("llama3", layout, pool, documents=documents, device=device)
        for pool in (lambda: None, CudaGraphPool)
    )
    assert got == want


def test_capture_freezes_what_is_no_tensor() -> None:
    """The stand-in finds a number that should change: these tests can fail."""
    numbers = iter([1.0, 2.0, 3.0])
    run = MicrobatchGraphs(
        lambda inputs, *, is_last: cast(torch.Tensor, inputs[0]) * next(numbers), [], OpRecorder()
    )
    one = torch.ones(())
    assert [run([(one,)])[0].item() for _ in range(3)] == [1.0, 2.0, 2.0]
    # After a rollback, weights may have moved.
    run.reset()
    assert run([(one,)])[0].item() == 3.0


def test_graphs_of_a_phase_that_has_ended_hold_no_memory() -> None:
    pool, one, live = OpRecorder(), torch.ones(()), list[int]()

    def double(inputs: Inputs, *, is_last: bool) -> torch.Tensor:
        live.append(pool.n_live)
        return 2 * cast(torch.Tensor, inputs[0])

    run = MicrobatchGraphs(double, [], pool)
    for n_microbatches in (1, 1, 2, 2, 3, 3, 4):
        run([(one,)] * n_microbatches)
    # Eager, captured once, and so on: before an eager step nothing is held.
    assert live == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 2]
    update = UpdateGraph(lambda each: each + 1, pool := OpRecorder())
    for capture_id in (None, 1, 1, 2):
        assert update(capture_id, one).item() == 2.0
        assert pool.n_live == (capture_id is not None)
    update.reset()
    assert pool.n_live == 0
