"""The roofline agrees with rows that were measured, and hides what compute can hide."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from config import load_config
from config.job_config import Compile, JobConfig, Parallelism
from planner.roofline import (
    ASYNC,
    HOP_SECONDS,
    LINK,
    NETWORK,
    StepTime,
    collective_seconds,
    exposed_seconds,
    is_inside_node,
    step_parts,
    step_time,
)
from planner.step_plan import StepPlan, plan_step
from planner.step_record import BACKWARD, FORWARD, UPDATE, Collective, Group, StepRecord
from run_spec import resolve
from runtime.devices import Hardware, find_hardware
from tests.lib.repository import ROOT

SIZE = 1 << 40


@pytest.fixture
def hardware() -> Hardware:
    return find_hardware("h100", None)


def measured(case: str) -> float:
    rows = map(json.loads, (ROOT / "benchmarks/results/h200.jsonl").read_text().splitlines())
    return next(row["tokens_per_second"] for row in rows if row["case"] == case)


def plan_of(world_size: int, *keys: str) -> StepPlan:
    run = resolve(load_config(Path("debug_model"), list(keys)), world_size, has_gpu=True)
    return plan_step(run, world_size)


def time_of(plan: StepPlan, device: str, **sections: Any) -> StepTime:
    """Time of ``plan`` whose configuration has ``sections`` instead, which change no record."""
    config = plan.run.config.model_copy(update=sections)
    changed = replace(plan, run=replace(plan.run, config=config))
    return step_time(changed, find_hardware(device, None))


def test_rows_of_a_small_model_are_predicted() -> None:
    keys = {
        "model.flavor": "124M", "model.vocab_size": 50304, "training.seq_len": 2048,
        "training.local_batch_size": 16, "activation_checkpoint.mode": "none",
    }  # fmt: skip
    plan = plan_of(1, *(part for key, value in keys.items() for part in (f"--{key}", str(value))))
    for case, is_compiled in (("124M, 2k", True), ("124M, 2k, eager", False)):
        predicted = time_of(plan, "h200", compile=Compile(enable=is_compiled)).tokens_per_second
        assert predicted == pytest.approx(measured(case), rel=0.05)


def test_ranks_share_adapters_in_rings_only(hardware: Hardware) -> None:
    nvlink, adapter = 450e9 * LINK, 50e9 * NETWORK

    def seconds(kind: str, ranks: range) -> float:
        group = Group("dim", tuple(ranks), 64)
        found = collective_seconds(Collective(FORWARD, kind, "dim", SIZE), group, hardware)
        return found - HOP_SECONDS * math.log2(len(ranks))

    gathered = {
        range(8): 7 / 8 / nvlink,
        range(0, 64, 8): 7 / 8 / adapter,
        range(0, 64, 4): 15 / 16 / (2 * adapter),
        range(64): 63 / 64 / (8 * adapter),
    }
    for ranks, expected in gathered.items():
        assert seconds("all_gather", ranks) == pytest.approx(SIZE * expected)
    # Of 64 ranks, 56 are on other nodes.
    assert seconds("all_to_all", range(64)) == pytest.approx(SIZE * 56 / 64 / adapter)
    assert seconds("all_to_all", range(8)) == pytest.approx(SIZE * 7 / 8 / nvlink)
    assert seconds("send", range(0, 16, 4)) == pytest.approx(SIZE / adapter)
    assert seconds("send", range(0, 8, 4)) == pytest.approx(SIZE / nvlink)


@pytest.mark.parametrize(
    ("ranks", "world_size", "device", "n_adapters"),
    [
        # Of two groups on two nodes, one has ranks on both: two on the first.
        (range(6), 12, "h100", 2),
        (range(6), 6, "h100", None),
        # 8 and 4 ranks, and the other group 4 and 8.
        (range(12), 24, "h100", 4),
        # 64 are on one node of 72; of 144, one group of 16 is on two.
        (range(16), 64, "gb200", None),
        (range(16), 144, "gb200", 8),
        # Pairs of neighbors, as of a dim outside of tensor parallel.
        (range(0, 12, 2), 24, "h100", 2),
        (range(4, 8), 8, "h100", None),
        ((0, 3, 5), 8, "h100", None),
        ((0, 3, 9), 16, "h100", 1),
    ],
)
def test_slowest_group_of_a_dim_counts(
    ranks: Sequence[int], world_size: int, device: str, n_adapters: int | None
) -> None:
    hardware = find_hardware(device, None)
    group = Group("dim", tuple(ranks), world_size)
    assert is_inside_node(group, hardware) == (n_adapters is None)
    rate = hardware.link.gb_per_second * 1e9 * LINK
    if n_adapters is not None:
        rate = min(rate, n_adapters * hardware.network.gb_per_second * 1e9 * NETWORK)
    n = len(ranks)
    found = collective_seconds(Collective(FORWARD, "all_gather", "dim", SIZE), group, hardware)
    assert found == pytest.approx(SIZE * (n - 1) / n / rate, rel=1e-3)


def test_pipeline_is_idle_for_a_share_of_what_repeats(hardware: Hardware) -> None:
    once = Collective(UPDATE, "reduce_scatter", "dp_shard_cp", SIZE)
    flops = {(FORWARD, "matmul"): 1e18}
    config = JobConfig(parallelism=Parallelism(pipeline_parallel_degree=2))
    both = [
        step_parts([replace(record_of(calls), flops=flops | more)], config, 8, hardware)
        for calls, more in (({}, {}), ({once: 1.0}, {(UPDATE, "matmul"): 1e18}))
    ]
    assert both[1]["matmul"] == 2 * both[0]["matmul"]
    assert both[1]["exposed dp_shard_cp"] > 0
    assert both[0]["pipeline idle"] == pytest.approx(both[0]["matmul"] / 8)
    assert both[1]["pipeline idle"] == pytest.approx(both[0]["pipeline idle"])


def test_async_tensor_parallel_hides_a_share_of_its_communication() -> None:
    keys = ("tensor_parallel_degree=2", "tensor_parallel_async=true")
    plan = plan_of(2, "--compile.enable=true", *(f"--parallelism.{key}" for key in keys))
    waiting = plan.run.config.parallelism.model_copy(update={"tensor_parallel_async": False})
    overlapped = dict(time_of(plan, "h100").parts)
    plain = dict(time_of(plan, "h100", parallelism=waiting).parts)
    hidden = plain.pop("exposed tp") - overlapped.pop("exposed tp")
    # Communication of this small model takes longer than its matmuls.
    assert hidden == pytest.approx(ASYNC * plain["matmul"])
    assert overlapped == plain


def test_eager_simple_fsdp_waits_for_all_weights() -> None:
    simple = "--parallelism.data_parallel=simple_fsdp"
    plan = plan_of(2, "--training.seq_len=2048", "--model.args.n_layers=2", simple)
    exposed = [
        time_of(plan, "h100", compile=Compile(enable=is_compiled)).parts["exposed dp_shard_cp"]
        for is_compiled in (False, True)
    ]
    assert exposed[0] > exposed[1]


def record_of(collectives: Mapping[Collective, float]) -> StepRecord:
    groups = {dim: Group(dim, tuple(range(8)), 16) for dim in ("dp_shard_cp", "tp")}
    return StepRecord({}, collectives, groups, {}, {})


def test_compute_hides_only_collectives_of_data_parallel(hardware: Hardware) -> None:
    gather = Collective(FORWARD, "all_gather", "dp_shard_cp", SIZE)
    wait = Collective(FORWARD, "all_gather", "tp", SIZE)
    call = SIZE * 7 / 8 / (450e9 * LINK)

    def exposed(compute: float, *collectives: Collective) -> dict[str, float]:
        record = record_of(dict.fromkeys(collectives, 4.0))
        return exposed_seconds(record, {FORWARD: compute}, {FORWARD: 1, BACKWARD: 1}, hardware)

    # All four are hidden but the first.
    assert exposed(10 * call, gather) == {"dp_shard_cp": pytest.approx(call, rel=1e-3)}
    assert exposed(1 * call, gather) == {"dp_shard_cp": pytest.approx(3 * call, rel=1e-3)}
    assert exposed(10 * call, wait) == {"tp": pytest.approx(4 * call, rel=1e-3)}
    # No compute of another phase hides it.
    late = (gather._replace(phase=BACKWARD), gather._replace(phase=UPDATE))
    assert exposed(10 * call, *late) == {"dp_shard_cp": pytest.approx(8 * call, rel=1e-3)}


@pytest.mark.parametrize(("reshard", "times"), [("default", 1), ("always", 8)])
def test_weights_that_a_pipeline_keeps_are_exposed_once(
    hardware: Hardware, reshard: str, times: int
) -> None:
    """Also on a stage of equal blocks, whose number of gathers does not tell the units'."""
    gather = Collective(FORWARD, "all_gather", "dp_shard_cp", SIZE)
    record = replace(record_of({gather: 16.0}), flops={(FORWARD, "matmul"): 1e18})
    keys = {"pipeline_parallel_degree": 2, "fsdp_reshard_after_forward": reshard}
    config = JobConfig(parallelism=Parallelism(**keys))
    exposed = step_parts([record], config, 8, hardware)["exposed dp_shard_cp"]
    call = collective_seconds(gather, record.groups["dp_shard_cp"], hardware)
    assert exposed == pytest.approx(times * call)


@pytest.mark.parametrize(("kind", "phase"), [("all_gather", FORWARD), ("all_reduce", BACKWARD)])
def test_what_runs_once_a_step_is_exposed_once(hardware: Hardware, kind: str, phase: str) -> None:
    """As weights that stay gathered, and gradients that replicas sum after the last microbatch."""
    block = Collective(phase, kind, "dp_shard_cp", SIZE)
    root = block._replace(payload=SIZE // 2)

    def calls(n: int, times: int) -> float:
        """Exposed calls as large as ``block``, if ``n`` microbatches run each ``times``."""
        record = record_of({block: 3.0 * times, root: 1.0 * times})
        exposed = exposed_seconds(record, {phase: math.inf}, {phase: n}, hardware)["dp_shard_cp"]
        return exposed / collective_seconds(block, record.groups["dp_shard_cp"], hardware)

    mean = 3.5 / 4
    assert calls(8, times=8) == pytest.approx(8 * mean, rel=1e-3)
    assert calls(8, times=1) == pytest.approx(mean, rel=1e-3)
