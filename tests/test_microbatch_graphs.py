"""Recorded microbatches: equal to eager ones bit for bit, whatever changes between steps."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from build_model import ShardedModel
from config import JobConfig
from config.job_config import ActivationCheckpoint, Compile, Float8, Optimizer
from forward_backward import SPMDRunner
from microbatch_graphs import CudaRecorder, MicrobatchGraphs
from optim.grad_norm import clip_grad_norm_
from optim.optimizer import build_optimizer
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
from tests.lib.op_recorder import OpRecorder, as_on_devices
from tests.lib.parity import global_batch, rows_of
from tests.lib.ranks import RankPool

# Number of microbatches of each step: kinds of steps repeat, and change.
STEPS = (3, 3, 1, 1, 3, 4, 3, 2, 2, 3)
FULL = ActivationCheckpoint(mode="full")
SELECTIVE = ActivationCheckpoint(mode="selective")
LAYOUTS = [
    Layout(1),
    Layout(1, recompute=FULL),
    Layout(2),
    Layout(2, {RESHARD: "always"}, recompute=SELECTIVE),
    Layout(2, {RESHARD: "never"}),
    Layout(2, {REDUCE: "last_microbatch"}),
    Layout(2, {MODE: "simple_fsdp"}, recompute=FULL),
    Layout(2, {TP: 2}),
    Layout(2, {CP: 2, METHOD: "ulysses"}),
    Layout(2, {CP: 2, METHOD: "allgather"}),
    Layout(4, {REPLICATE: 2}, recompute=FULL),
    Layout(4, {REPLICATE: 2, REDUCE: "last_microbatch"}),
    Layout(2, float8=Float8(recipe="tensorwise", emulate=True, skip_small=False)),
]


def train(
    model: str, layout: Layout, recorder: Any, *, documents: bool, device: torch.device = CPU
) -> list[Any]:
    """Losses, norms, and digests of the weights after STEPS. Collective."""
    dtype = "float32" if layout.float8.recipe != "none" else "float64"
    sharded = shard_debugmodel(model, args_of(model), layout, dtype=dtype, device=device)
    module = sharded.module
    materialize(module, device, seed=3)
    runner = build_runner(sharded, layout, recorder)
    optimizer = build_optimizer(module, Optimizer(lr=1e-2))
    batch = global_batch(sharded.args.vocab_size, documents)
    found: list[Any] = []
    for step, count in enumerate(STEPS):
        rows = [(step + index) % len(batch.tokens) for index in range(count)]
        microbatches = [rows_of(batch, slice(row, row + 1)) for row in rows]
        if step in (4, 7):
            found += runner.evaluate(microbatches).tolist()
        # As if other ranks had other numbers of tokens in each step.
        losses = runner.forward_backward(microbatches, SEQ_LEN * count + step)
        parameters = list(module.parameters())
        norm = clip_grad_norm_(parameters, 0.05)
        optimizer.step()
        optimizer.zero_grad()
        found += [*losses.tolist(), norm.item()]
    return [*found, *(digest(p.detach().cpu()) for p in module.parameters())]


def build_runner(sharded: ShardedModel, layout: Layout, recorder: Any) -> SPMDRunner:
    return SPMDRunner(
        sharded.module,
        sharded.dims.cp_mesh,
        parallelism=sharded.config.parallelism,
        device=sharded.device,
        compile=sharded.config.compile,
        recorder=recorder,
    )


def compare(model: str, layout: Layout, documents: bool) -> None:
    want = train(model, layout, None, documents=documents)
    with as_on_devices():
        got = train(model, layout, recorder := OpRecorder(), documents=documents)
    assert recorder.n_recorded > 100
    assert got == want


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_recorded_steps_equal_eager_ones(ranks: RankPool, layout: Layout) -> None:
    ranks.run(compare, layout.world_size, "llama3", layout, False)


@pytest.mark.parametrize("model", ["llama3", "qwen3"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_recorded_documents_equal_eager_ones(ranks: RankPool, model: str, world_size: int) -> None:
    ranks.run(compare, world_size, model, Layout(world_size), True)


def reasons(changes: list[dict[str, dict[str, Any]]]) -> list[str]:
    sharded = shard_debugmodel("llama3", args_of("llama3"), Layout(1))
    found = []
    for change in changes:
        config = JobConfig.model_validate(change)
        model = replace(sharded, config=config, device=torch.device("cuda"))
        found.append(model.without_cuda_graphs)
    return found


def test_what_runs_without_graphs_says_why(ranks: RankPool) -> None:
    wanted: dict[str, dict[str, dict[str, Any]]] = {
        "": {},
        "compile.cuda_graphs": {"compile": {"cuda_graphs": "never"}},
        "parallelism.fsdp_cpu_offload": {"parallelism": {"fsdp_cpu_offload": True}},
        "debug.deterministic": {"debug": {"deterministic": "elastic"}},
        "metrics.straggler_window": {"metrics": {"straggler_window": 5}},
        "compiled recomputation of attention": {
            "compile": {"enable": True},
            "activation_checkpoint": {"mode": "full"},
        },
        'models of your own: compile.cuda_graphs = "always"': {"model": {"name": "my:model"}},
    }
    (found,) = ranks.run(reasons, 1, list(wanted.values()))
    assert found == list(wanted)
    own = {"model": {"name": "my:model"}, "compile": {"cuda_graphs": "always"}}
    assert ranks.run(reasons, 1, [own]) == [[""]]


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
        train("llama3", layout, recorder, documents=documents, device=device)
        for recorder in (None, CudaRecorder())
    )
    assert got == want


def test_recording_freezes_what_is_no_tensor() -> None:
    """The recorder finds a number that should change: these tests can fail."""
    numbers = iter([1.0, 2.0, 3.0])
    run = MicrobatchGraphs(
        lambda inputs, *, is_last: cast(torch.Tensor, inputs[0]) * next(numbers), [], OpRecorder()
    )
    one = torch.ones(())
    assert [run([(one,)])[0].item() for _ in range(3)] == [1.0, 2.0, 2.0]
    # After a rollback, weights may have moved.
    run.forget()
    assert run([(one,)])[0].item() == 3.0
