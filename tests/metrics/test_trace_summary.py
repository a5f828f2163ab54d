"""Summaries of traces made by hand in the format of Kineto, in which the truth is known.

Host and device are in milliseconds. Traces of real CPU steps are in test_profiling.py; of GPUs
there are only these.
"""

import gzip
import re
from pathlib import Path
from typing import Any

import pytest

from metrics import trace_file
from metrics.intervals import intersect, merge, subtract, total
from metrics.trace_advice import advice
from metrics.trace_file import read_trace
from metrics.trace_summary import RankSummary, compare_ranks, summarize
from tests.lib.traces import (
    COMM,
    LOADER,
    Event,
    annotation,
    device_step,
    event,
    kernel,
    nccl,
    step,
    write,
)


def read(path: Path) -> RankSummary:
    return summarize(read_trace(path), n_top=10)


def shares(summary: RankSummary) -> dict[str, float]:
    names = ("compute", "exposed", "data_wait", "host", "communication")
    return {name: round(100 * getattr(summary, name) / summary.time, 6) for name in names}


def test_gpu_step_is_split_into_its_parts(tmp_path: Path) -> None:
    """100 ms: data wait 0 to 10, launch until 15, gemm 15 to 60, NCCL 50 to 80, gemm 80 to 95."""
    path = write(
        tmp_path / "trace.json",
        step(8, 0, 100), device_step(8, 15, 95), device_step(8, 50, 80, COMM),
        annotation("data wait", 0, 10), annotation("step sync", 10, 11),
        kernel(15, 60), nccl(50, 80), kernel(80, 95, "softmax"),
    )  # fmt: skip
    summary = read(path)
    assert summary.is_gpu
    assert summary.time == pytest.approx(100_000)
    assert shares(summary) == {
        "compute": 60, "exposed": 21, "data_wait": 10, "host": 9, "communication": 30
    }  # fmt: skip
    assert [(each.name, each.count) for each in summary.top] == [("gemm", 1), ("softmax", 1)]
    [collective] = summary.by_collective
    assert (collective.description, round(collective.exposed)) == ("mesh_dp_shard", 20_000)


def test_device_that_lags_behind_the_host_is_counted_on_its_own_time(tmp_path: Path) -> None:
    """The host launches steps 8 and 9 in 10 ms each, while the device is busy with step 7."""
    path = write(
        tmp_path / "trace.json",
        step(8, 0, 10), step(9, 10, 20), device_step(8, 30, 70), device_step(9, 70, 110),
        kernel(-5, 30, "step 7"), kernel(30, 70), kernel(70, 90), kernel(100, 110),
    )  # fmt: skip
    summary = read(path)
    assert summary.time == pytest.approx(80_000), "two steps of 40 ms"
    assert shares(summary)["compute"] == 87.5
    assert [each.name for each in summary.top] == ["gemm"]


def test_validation_between_steps_on_a_gpu_is_named_and_not_counted(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.json",
        step(8, 0, 40), annotation("validation", 41, 90), step(9, 91, 131),
        device_step(8, 2, 50), device_step(9, 93, 131),
        kernel(2, 50), kernel(50, 90, "validation's gemm"), kernel(93, 131),
    )  # fmt: skip
    summary = read(path)
    assert summary.time == pytest.approx(90_000)
    assert [each.name for each in summary.top] == ["gemm"]
    assert {name: round(time) for name, time in summary.between.items()} == {"validation": 49_000}


def test_cpu_operators_count_without_those_that_they_call(tmp_path: Path) -> None:
    """Python hooks in backward are not compute; nor are operators of other threads."""
    backward = "autograd::engine::evaluate_function: MmBackward0"
    path = write(
        tmp_path / "trace.json",
        step(8, 0, 100),
        annotation("data wait", 0, 20),
        event("cpu_op", "aten::read", 0, 20, LOADER),
        event("cpu_op", "aten::linear", 20, 50), event("cpu_op", "aten::mm", 25, 50),
        event("cpu_op", backward, 50, 90), event("cpu_op", "aten::mm", 60, 70),
        event("user_annotation", "gloo:all_reduce", 65, 85, LOADER),
        gpus=0,
    )  # fmt: skip
    summary = read(path)
    assert shares(summary) == {
        "compute": 40, "exposed": 15, "data_wait": 20, "host": 25, "communication": 20
    }  # fmt: skip
    times = {each.name: (each.count, round(each.microseconds)) for each in summary.top}
    assert times == {"aten::mm": (2, 35_000), "aten::linear": (1, 5_000)}


def two_ranks(tmp_path: Path, late: float, *, gpus: int, groups: list[list[int]] | None = None):
    """Four collectives of 5 ms, which rank 1 joins ``late`` ms after rank 0."""
    found = []
    for rank in (0, 1):
        delay = late * rank
        events = [step(8, 0, 400), kernel(0, 1)] if gpus else [step(8, 0, 400)]
        for start in range(0, 400, 100):
            begin, end = start + delay, start + late + 5
            gloo = event("user_annotation", "gloo:all_reduce", begin, end, LOADER)
            events.append(nccl(begin, end) if gpus else gloo)
        path = tmp_path / f"trace-step-00000008-rank{rank}.json.gz"
        found.append(read(write(path, *events, rank=rank, gpus=gpus, groups=groups)))
    return found


@pytest.mark.parametrize("gpus", [0, 1], ids=["gloo", "nccl"])
def test_the_rank_that_the_others_wait_for_is_named(tmp_path: Path, gpus: int) -> None:
    found = two_ranks(tmp_path, 25.0, gpus=gpus)
    skew = compare_ranks(found)
    assert (skew.n_compared, skew.n_last) == (4, {0: 0, 1: 4})
    assert skew.waits == {0: pytest.approx(100_000), 1: 0.0}
    late, *_ = advice(found, skew, {})
    assert late.startswith("rank 1 came last in 4 of 4 collectives, and the others wait 25.0 %")
    assert "metrics.straggler_window" in late
    # Which compares no ranks of tensor parallel.
    late, *_ = advice(found, skew, {"parallelism": {"tensor_parallel_degree": 2}})
    assert late.startswith("rank 1 came last")
    assert "straggler_window" not in late
    # The last stage of a pipeline is late by its schedule.
    pipeline = advice(found, skew, {"parallelism": {"pipeline_parallel_degree": 2}})
    assert not [line for line in pipeline if "came last" in line]


def test_equal_ranks_accuse_nobody(tmp_path: Path) -> None:
    found = two_ranks(tmp_path, 0.0, gpus=1)
    assert not [line for line in advice(found, compare_ranks(found), {}) if "came last" in line]


def test_gloo_of_several_groups_is_not_compared(tmp_path: Path) -> None:
    """Its events do not say to which group they belong."""
    found = two_ranks(tmp_path, 25.0, gpus=0, groups=[[0, 1], [0, 1, 2, 3]])
    skew = compare_ranks(found)
    assert skew.n_compared == 0
    assert "do not name their group" in skew.problem


def advice_of(path: Path, *events: Event, gpus: int = 1, **config: Any) -> str:
    summary = read(write(path, step(8, 0, 100), *events, gpus=gpus))
    return "\n".join(advice([summary], compare_ranks([summary]), config))


@pytest.mark.parametrize(
    ("dim", "key"),
    [
        ("dp_shard_cp", "parallelism.fsdp_forward_prefetch"),
        ("tp", "parallelism.tensor_parallel_async"),
        ("cp", "parallelism.context_parallel_method"),
        ("pp", "parallelism.pipeline_parallel_schedule"),
        ("ep", "parallelism.expert_parallel_degree"),
    ],
)
def test_exposed_communication_names_the_keys_of_its_mesh_dim(
    tmp_path: Path, dim: str, key: str
) -> None:
    text = advice_of(tmp_path / "trace.json", kernel(0, 60), nccl(60, 100, dim=dim))
    assert "exposed communication, 40.0 % of a step" in text
    assert key in text
    assert text.count("parallelism.") == text.count(key.rpartition("_")[0].rpartition("_")[0])


@pytest.mark.parametrize(
    ("keys", "left"),
    [
        ({}, "reshard_after_forward forward_prefetch reduce_gradients"),
        ({"data_parallel": "fsdp2", "fsdp_reshard_after_forward": "always"},
         "reshard_after_forward forward_prefetch reduce_gradients"),
        ({"fsdp_reduce_gradients": "last_microbatch", "fsdp_reshard_after_forward": "never"},
         "forward_prefetch"),
        ({"data_parallel": "simple_fsdp"}, "reshard_after_forward"),
    ],
)  # fmt: skip
def test_only_keys_that_the_run_can_change_are_named(
    tmp_path: Path, keys: dict[str, str], left: str
) -> None:
    events = kernel(0, 60), nccl(60, 100, dim="dp_shard_cp")
    text = advice_of(tmp_path / "trace.json", *events, parallelism=keys)
    assert re.findall(r"parallelism\.fsdp_(\w+)", text) == left.split()
    assert "training.local_batch_size" in text


@pytest.mark.parametrize(
    ("tables", "left"),
    [
        ({}, "reshard_after_forward forward_prefetch reduce_gradients"),
        ({"training": {"global_batch_size": 8}}, "reshard_after_forward forward_prefetch"),
        ({"debug": {"deterministic": "elastic"}}, "reshard_after_forward forward_prefetch"),
        ({"parallelism": {"pipeline_parallel_degree": 2}}, "forward_prefetch"),
        ({"parallelism": {"data_parallel": "simple_fsdp"}}, ""),
    ],
)
def test_no_key_is_named_that_the_run_would_reject(
    tmp_path: Path, tables: dict[str, dict[str, Any]], left: str
) -> None:
    events = kernel(0, 60), nccl(60, 100, dim="dp_shard_cp")
    config: dict[str, dict[str, Any]] = {
        "training": {"global_batch_size": 16, "local_batch_size": 4},
        "parallelism": {
            f"{dim}_parallel_degree": 1 for dim in ("tensor", "context", "pipeline", "expert")
        },
        "activation_checkpoint": {"mode": "selective"},
    }
    config |= {name: config.get(name, {}) | keys for name, keys in tables.items()}
    text = advice_of(tmp_path / "trace.json", *events, **config)
    assert re.findall(r"parallelism\.fsdp_(\w+)", text) == left.split()


def test_slow_data_and_an_idle_gpu_name_their_keys(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    text = advice_of(path, annotation("data wait", 0, 30), kernel(30, 60))
    assert "waiting for data, 30.0 % of a step: data.prefetch" in text
    assert "host, 40.0 % of a step (the GPU has nothing to do): compile.enable, tr" in text
    assert "compile.enable" not in advice_of(path, kernel(30, 60), compile={"enable": True})


def test_hidden_communication_needs_no_advice(tmp_path: Path) -> None:
    text = advice_of(tmp_path / "trace.json", kernel(0, 100), nccl(10, 90))
    assert text.startswith("compute, 100.0 % of a step: compile.enable")
    assert "exposed" not in text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no \"traceEvents\""),
        (b"[1, 2]", "no \"traceEvents\""),
        (b'{"traceEvents": [1]}', "an event is no object"),
        (b'{"traceEvents": [{"ph": "X", "name": "a"', "torn or damaged"),
        (b'{"traceEvents": [{"ph": "X", "name": "a"}]}', "without ts, dur or name"),
        (b'{"traceEvents": [{"ph": "X", "name": "a", "ts": NaN, "dur": 1}]}', "without ts"),
        (b'{"traceEvents": []}', "no ProfilerStep"),
        (b'{"traceEvents": [' + b"[" * 100_000, "torn|nested|no object"),
        (gzip.compress(b'{"traceEvents": [ ' + b" " * 1000, mtime=0)[:-20],
         "gzip stream ends early"),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_rejected_by_name(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path}: .*({says})"):
        read(path)


def test_a_gpu_trace_without_kernels_is_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.json", step(8, 0, 100), event("cpu_op", "aten::mm", 0, 90))
    with pytest.raises(ValueError, match="no kernels"):
        read(path)


def test_memory_is_bounded_by_the_events_that_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks end anywhere; events of no interest are not kept."""
    python = [event("python_function", "x" * 50, 0, 1) for _ in range(200)]
    path = write(tmp_path / "trace.json", step(8, 0, 100), *python, kernel(0, 60))
    monkeypatch.setattr(trace_file, "CHUNK", 7)
    monkeypatch.setattr(trace_file, "MAX_EVENTS", 2)
    assert shares(read(path))["compute"] == 60
    monkeypatch.setattr(trace_file, "MAX_EVENTS", 1)
    with pytest.raises(ValueError, match="more than 1 events"):
        read(path)
    monkeypatch.setattr(trace_file, "MAX_EVENTS", 10)
    monkeypatch.setattr(trace_file, "MAX_EVENT", 20)
    with pytest.raises(ValueError, match="torn or damaged"):
        read(path)


def test_an_operator_that_a_dispatch_mode_calls_again_counts_once(tmp_path: Path) -> None:
    """Recomputation and DTensor see aten::mm, and call it again within."""
    path = write(
        tmp_path / "trace.json", step(8, 0, 100),
        event("cpu_op", "aten::mm", 0, 40), event("cpu_op", "aten::copy_", 1, 2),
        event("cpu_op", "aten::mm", 5, 30), event("cpu_op", "aten::mm", 40, 60),
        gpus=0,
    )  # fmt: skip
    times = {each.name: (each.count, round(each.microseconds)) for each in read(path).top}
    assert times == {"aten::mm": (2, 59_000), "aten::copy_": (1, 1_000)}


def test_an_operator_whose_result_was_kept_is_not_counted(tmp_path: Path) -> None:
    """Forward, recomputed and looked up in backward, and backward's own."""

    def mm(begin: float, end: float, *, is_recorded: bool = False) -> dict[str, Any]:
        number = {"Sequence number": 5} if is_recorded else {}
        return event("cpu_op", "aten::mm", begin, end, **number)

    backward = event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 20, 90)
    recomputed = [mm(30, 40, is_recorded=True), mm(32, 39)]
    looked_up, own, after = mm(45, 50, is_recorded=True), mm(60, 80), mm(92, 95, is_recorded=True)
    forward = [mm(0, 10, is_recorded=True), mm(2, 9)]
    ends = step(8, 0, 100), backward
    everything = [*ends, *forward, *recomputed, looked_up, own, after]
    (times,) = read(write(tmp_path / "selective.json", *everything, gpus=0)).top
    assert (times.count, round(times.microseconds)) == (4, 43_000)
    # Without a dispatch mode, whatever was seen ran.
    plain = [*ends, forward[0], recomputed[0], looked_up, own]
    (times,) = read(write(tmp_path / "full.json", *plain, gpus=0)).top
    assert (times.count, round(times.microseconds)) == (4, 45_000)


def test_sets_of_intervals() -> None:
    a, b = merge([(5, 7), (0, 2), (1, 3), (9, 9)]), [(2.0, 6.0)]
    assert a == [(0, 3), (5, 7)]
    assert intersect(a, b) == [(2, 3), (5, 6)]
    assert subtract(a, b) == [(0, 2), (6, 7)]
    assert subtract(a, []) == a
    assert subtract([], b) == []
    assert total(a) == 5
