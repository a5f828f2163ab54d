"""A simulated step has the collectives, FLOPs and memory of a real one."""

from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks.counting import held_bytes, operand_bytes, profiled
from config import ConfigError
from models.moe import MoE
from models.transformer import Transformer
from parallelisms.parallel_dims import ParallelDims
from planner.recorder import COLLECTIVES, StepRecorder
from planner.simulate import (
    build_gpu_model,
    fake_ranks,
    gpu_updates,
    groups_of,
    local_vocabulary,
    planned_batch,
    record_step,
)
from planner.step_plan import plan_step
from planner.step_record import (
    ACTIVATIONS,
    BACKWARD,
    FORWARD,
    GRADIENTS,
    PARAMETERS,
    UPDATE,
    Collective,
    StepRecord,
)
from tests.lib.marks import slow
from tests.lib.planned import (
    BATCH,
    CP,
    EMULATED,
    EP,
    FLOAT8,
    LARGER,
    METHOD,
    MODE,
    MOE,
    NEXT,
    PP,
    RECOMPUTE,
    REDUCE,
    REPLICATE,
    RESHARD,
    SCHEDULE,
    TP,
    Keys,
    run_of,
)
from tests.lib.ranks import RankPool
from train_step import TrainStep

Counts = Counter[tuple[str, int]]
route = MoE.route


def real_step(keys: Keys, world_size: int) -> tuple[StepRecord, Counts, int]:
    """Record a real step of this rank; count collectives and memory of the next by profiler."""
    run = run_of(keys, world_size)
    dims = ParallelDims.build(run.config.parallelism, world_size, "cpu")
    model = build_gpu_model(run, dims)
    model.materialize()
    recorder = StepRecorder(groups_of(model), local_vocabulary(model), is_real=True)
    count = run.global_batch_size // (run.microbatch_size * dims.degrees.batch)
    batch = planned_batch(run, count)
    with gpu_updates(recorder), patch.object(MoE, "route", balanced_route):
        step = TrainStep(run, model)
        record = record_step(step, model, recorder, batch=batch, weights=[1.0] * count)
        states = step.optimizer.state.values()
        held = held_bytes([*model.module.parameters(), *model.module.buffers()])
        held += sum(held_bytes(state.values()) for state in states)
        calls, peak = of_profile(profiled(lambda: step(3, batch)))
    return record, calls, held + peak


def without_connecting(collectives: dict[Collective, float]) -> dict[Collective, float]:
    """Without those by which a schedule of PyTorch 2.15 connects stages in its first step."""
    connecting = Collective(FORWARD, "all_reduce", "pp", 4)
    return {call: count for call, count in collectives.items() if call != connecting}


def balanced_route(moe: MoE, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each expert gets the same number of tokens."""

    def topk(scores: torch.Tensor, top_k: int, dim: int) -> Any:
        chosen = torch.arange(scores[..., 0].numel() * top_k) % scores.shape[-1]
        return SimpleNamespace(indices=chosen.view(*scores.shape[:-1], top_k))

    with patch.object(torch.Tensor, "topk", topk):
        return route(moe, x)


def of_profile(events: list) -> tuple[Counts, int]:
    """Collectives by kind and bytes, and the peak of what is allocated above the start."""
    calls, live = Counts(), dict[int, int]()
    held = peak = 0
    for event in events:
        fields = event.extra_fields
        kind = [kind for part, kind in COLLECTIVES.items() if part in event.name]
        if event.name.startswith("c10d::") and kind and not is_inside_its_like(event):
            calls[kind[0], max(operand_bytes(operand) for operand in fields.inputs[:2])] += 1
        elif event.tag.name == "Allocation" and fields.alloc_size > 0:
            live[fields.ptr] = fields.alloc_size
            held += fields.alloc_size
        elif event.tag.name == "Allocation":
            held -= live.pop(fields.ptr, 0)
        peak = max(peak, held)
    return calls, peak


@pytest.mark.parametrize(
    ("world_size", "keys"),
    [
        (2, {}),
        (2, {BATCH: 16, RECOMPUTE: "full"}),
        slow(2, {BATCH: 20, RESHARD: "never"}),
        slow(2, {BATCH: 16, REDUCE: "last_microbatch"}),
        slow(2, {TP: 2, RECOMPUTE: "selective"}),
        slow(2, {CP: 2, RECOMPUTE: "selective"}),
        (2, {CP: 2, METHOD: "allgather", RECOMPUTE: "full"}),
        slow(2, {MODE: "ddp", BATCH: 16}),
        (2, {MODE: "simple_fsdp", RECOMPUTE: "selective"}),
        (2, {"optimizer.name": "muon"}),
        slow(2, {PP: 2, BATCH: 8}),
        (4, {PP: 2, BATCH: 8, SCHEDULE: "Interleaved1F1B", "model.args.n_layers": 4}),
        (4, {REPLICATE: 2, BATCH: 16}),
        slow(4, {REPLICATE: 2, MODE: "simple_fsdp"}),
        (4, {TP: 2, RECOMPUTE: "full", "model.flavor": "debugmodel_tied"}),
        slow(4, {TP: 2, CP: 2}),
        slow(4, {RESHARD: 2}),
        slow(2, MOE | {EP: 2, RECOMPUTE: "full"}),
        (4, MOE | {EP: 4, TP: 2, RECOMPUTE: "selective"}),
        (2, NEXT | {CP: 2}),
        slow(2, EMULATED | {FLOAT8: "tensorwise", RECOMPUTE: "selective"}),
        (2, EMULATED | {FLOAT8: "tensorwise", TP: 2}),
    ],
    ids=str,
)
def test_collectives_are_those_of_a_real_step(ranks: RankPool, world_size: int, keys: Keys) -> None:
    found = ranks.run(real_step, world_size, keys, world_size)
    plan = plan_step(run_of(keys, world_size), world_size)
    for stage in plan.stages:
        real, profile, _ = found[stage.stage * world_size // plan.degrees.pp]
        planned = stage.record
        assert planned.collectives == without_connecting(real.collectives)
        assert {dim: planned.groups[dim] for dim in real.groups} == real.groups
        if keys.get("model.name") != "qwen3_next":  # Whose delta rule has other kernels on GPUs.
            assert as_matmuls(planned.flops) == real.flops
        assert by_size(planned) == profile


@pytest.mark.parametrize(
    "keys",
    [
        {CP: 4},
        slow({CP: 4, METHOD: "allgather"}),
        {CP: 4, METHOD: "allgather", MODE: "simple_fsdp"},
        MOE | {EP: 4},
    ],
    ids=str,
)
def test_collectives_of_tokens_over_all_ranks_are_no_data_parallel_ones(keys: Keys) -> None:
    def of_tokens(world_size: int) -> list[tuple[str, str, str, float]]:
        record = plan_step(run_of(keys, world_size), world_size).stages[0].record
        found = record.collectives.items()
        return [
            (key.phase, key.kind, key.dim, count)
            for key, count in found
            if key.dim in ("cp", "ep") and key.phase != UPDATE
        ]

    # With more ranks, each mesh dim has a process group of its own.
    assert of_tokens(4) == of_tokens(8) != []


@pytest.mark.parametrize(("mode", "repeats"), [("selective", set()), ("full", {"recompute"})])
def test_selective_recomputation_repeats_no_all_to_all(mode: str, repeats: set[str]) -> None:
    """Not even that of token counts."""
    run = run_of(MOE | {EP: 2, RECOMPUTE: mode}, 2)
    calls = plan_step(run, 2).stages[0].record.collectives
    phases = {call.phase for call in calls if call.kind == "all_to_all"}
    assert phases == {FORWARD, BACKWARD} | repeats


def as_matmuls(flops: Mapping[tuple[str, str], float]) -> Counter[tuple[str, str]]:
    """FLOPs with those of a GPU's float8 as other matmuls."""
    counts = Counter[tuple[str, str]]()
    for (phase, kind), count in flops.items():
        counts[phase, kind.removeprefix("float8 ")] += count
    return counts


def is_inside_its_like(event: Any) -> bool:
    """True for what the mode of selective recomputation calls in place of the call that it took."""
    parent = event.parent
    while parent is not None and parent.name != event.name:
        parent = parent.parent
    return parent is not None


def by_size(record: StepRecord) -> Counts:
    counts = Counts()
    for collective, count in record.collectives.items():
        counts[collective.kind, collective.payload] += round(count)
    return counts


@pytest.mark.parametrize(
    ("world_size", "keys"),
    [
        (1, {}),
        (2, {RECOMPUTE: "selective"}),
        slow(2, {RECOMPUTE: "full", RESHARD: "never", BATCH: 32}),
        (4, {TP: 2}),
    ],
    ids=str,
)
def test_memory_is_that_of_a_real_step(world_size: int, keys: Keys) -> None:
    """Real tensors, in a group whose threads hold none."""
    keys = LARGER | keys
    (stage,) = plan_step(run_of(keys, world_size), world_size).stages
    with fake_ranks(0, world_size):
        _, _, profile = real_step(keys, world_size)
    assert stage.record.peak == pytest.approx(profile, rel=0.05)


@pytest.mark.parametrize(("world_size", "keys"), [(1, {}), (2, {PP: 2, BATCH: 8})], ids=str)
def test_a_model_whose_code_reads_values_is_named(world_size: int, keys: Keys) -> None:
    forward = Transformer.forward

    def reading(self: Transformer, *inputs: Any, **options: Any) -> torch.Tensor:
        result = forward(self, *inputs, **options)
        return result if result.sum().item() > 0 else -result

    run = run_of(keys, world_size)
    refused = pytest.raises(ConfigError, match=r"model\.name: is not planned")
    with patch.object(Transformer, "forward", reading), refused:
        plan_step(run, world_size)


def test_gradients_that_wait_for_replicas_are_named() -> None:
    run = run_of(LARGER | {REPLICATE: 2, BATCH: 64}, 4)
    memory = plan_step(run, 4).stages[0].record.memory
    assert memory[GRADIENTS] == pytest.approx(memory[PARAMETERS], rel=0.01)


@pytest.mark.parametrize("keys", [{TP: 2}, {TP: 2, PP: 2}, {REPLICATE: 2, CP: 2}])
def test_muon_is_planned_on_a_mesh_of_several_dims(keys: Keys) -> None:
    plan = plan_step(run_of({"optimizer.name": "muon"} | keys, 8), 8)
    for stage in plan.stages:
        calls = [call for call in stage.record.collectives if call.phase == UPDATE]
        assert "all_to_all" in {call.kind for call in calls if call.dim == "stage"}


def test_hidden_states_of_the_vocabularys_size_are_no_logits() -> None:
    keys = {"model.args.dim": 320, "model.args.n_layers": 4, "training.local_batch_size": 8}
    plans = [plan_step(run_of(keys | {"model.vocab_size": size}, 1), 1) for size in (320, 384)]
    memory = [plan.stages[0].record.memory[ACTIVATIONS] for plan in plans]
    assert memory[0] == pytest.approx(memory[1], rel=0.1)


def test_a_plan_is_deterministic() -> None:
    run = run_of({BATCH: 32}, 8)
    first, second = (plan_step(run, 8).stages[0].record for _ in range(2))
    assert first == second


def test_float8_halves_what_tensor_parallel_gathers() -> None:
    """But for the output layer's. Input gradients are summed over the matmuls before they are
    reduced over the ranks, and each scale takes an all-reduce."""
    n_layers = 2
    common = {TP: 2, "model.args.n_layers": n_layers}
    records = [
        plan_step(run_of(common | keys, 2), 2).stages[0].record
        for keys in ({}, EMULATED | {FLOAT8: "tensorwise"})
    ]
    for phase in (FORWARD, BACKWARD):
        plain, float8 = (
            Counter(
                {
                    (call.kind, call.payload): n
                    for call, n in record.collectives.items()
                    if (call.phase, call.dim) == (phase, "tp")
                }
            )
            for record in records
        )
        ((gathered, size),) = (key for key in plain if key[0] == "all_gather")
        plain.subtract({(gathered, size): 2 * n_layers})
        plain.update({(gathered, size // 2): 2 * n_layers, ("all_reduce", 4): 2 * n_layers})
        assert float8 == plain
        assert float8["reduce_scatter", size] > 2 * n_layers
