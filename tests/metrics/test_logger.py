import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from config.job_config import Metrics
from metrics.logger import MetricsLogger
from metrics.tracker import TrackedRun
from metrics.trackers import Trackers, tracker_classes
from runtime.log import logger
from tests.lib.durability import file_size_limit

VALUES = {"loss": 0.1 + 0.2, "grad_norm": 1 / 3, "lr": 3e-4 * 0.7}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    times = SimpleNamespace(perf_counter=clock, time=lambda: 1.7e9 + clock())
    monkeypatch.setattr("metrics.logger.time", times)
    return clock


def build(folder: Path, *, tensorboard: bool = False, **changes: Any) -> MetricsLogger:
    keywords: dict[str, Any] = {
        "is_writer": True,
        "device": torch.device("cpu"),
        "n_devices": 4,
        "flops_per_token": (6e6, 5e6),
        "peak_flops": 1e9,
    }
    if tensorboard:
        tracked = TrackedRun("id", "run", "project", folder, {}, changes.get("resumed_step"))
        keywords["trackers"] = Trackers(tracker_classes(["tensorboard"]), tracked)
    return MetricsLogger(folder, Metrics(log_freq=10), **(keywords | changes))


def test_time_left_has_the_share_of_validation(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = build(tmp_path)
    # What is before the first step is not repeated.
    with metrics.exclude_from_throughput():
        clock.now += 100.0
    for step, left in ((1, "0:16:30"), (2, "0:16:20"), (3, "0:21:33")):
        metrics.end_step(1, tokens=1000, n_sequences=1, data_wait=0.0)
        clock.now += 10.0
        with caplog.at_level("INFO"):
            metrics.log(step, 100 - step, VALUES)
        assert caplog.text.endswith(f"left {left}\n")
        if step == 2:
            with metrics.exclude_from_throughput():
                clock.now += 10.0


def test_time_left_of_a_ramp_is_that_of_the_latest_size(tmp_path: Path, clock: Clock) -> None:
    metrics = build(tmp_path)
    for step, n_sequences in enumerate((2, 2, 32), 1):
        metrics.end_step(step, tokens=100 * n_sequences, n_sequences=n_sequences, data_wait=0.0)
        clock.now += 0.1 * n_sequences
    assert metrics.log(3, 10, VALUES)["seconds_left"] == pytest.approx(32.0)


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_line_has_every_key_at_full_precision(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = build(tmp_path)
    for _ in range(2):
        metrics.end_step(1, tokens=1000, n_sequences=1, data_wait=0.25)
        clock.now += 5.0
    with caplog.at_level("INFO"):
        metrics.log(20, 80.5, VALUES)
    assert "mfu 30.0%  memory" in caplog.text
    assert caplog.text.endswith("data  5.0%  left 0:06:42\n")
    assert not (tmp_path / "tensorboard").exists()
    (record,) = records(tmp_path)
    assert record.pop("memory_gib") > 0.01
    assert record == VALUES | {
        "step": 20,
        "time": 1.7e9 + 1010.0,
        "restarts": 0,
        "seconds_per_step": 5.0,
        "tokens_per_second": 200.0,
        "mfu": 6e6 * (200.0 / 4) / 1e9,
        "mfu_causal": 5e6 * (200.0 / 4) / 1e9,
        "data_wait": 0.05,
        "seconds_left": 5.0 * 80.5,
    }


def test_throughput_is_since_last_line_without_excluded_time(tmp_path: Path, clock: Clock) -> None:
    metrics = build(tmp_path)
    for seconds in (2.0, 4.0):
        for _ in range(2):
            metrics.end_step(1, tokens=1000, n_sequences=1, data_wait=0.5)
            clock.now += seconds
            with metrics.exclude_from_throughput():
                clock.now += 100.0
        metrics.log(10, 100, VALUES)
    speeds = [(record["tokens_per_second"], record["data_wait"]) for record in records(tmp_path)]
    assert speeds == [(500.0, 0.25), (250.0, 0.125)]


def test_mfu_is_none_for_unknown_peak(tmp_path: Path, clock: Clock) -> None:
    metrics = build(tmp_path, peak_flops=None)
    metrics.end_step(1, tokens=1, n_sequences=1, data_wait=0.0)
    clock.now += 1.0
    metrics.log(1, 1, VALUES)
    (record,) = records(tmp_path)
    assert (record["mfu"], record["mfu_causal"]) == (None, None)


def test_validation_logged_by_source_and_in_bits_per_byte(tmp_path: Path) -> None:
    build(tmp_path).log_validation(
        10, {"": 2.0, "sun": 1.5, "moon": 2.5}, bits_per_nat={"": 0.25, "sun": 0.5}
    )
    (record,) = records(tmp_path)
    assert {key: value for key, value in record.items() if key.startswith("validation")} == {
        "validation_loss": 2.0,
        "validation_loss/sun": 1.5,
        "validation_loss/moon": 2.5,
        "validation_bits_per_byte": 2.0 * 0.25,
        "validation_bits_per_byte/sun": 1.5 * 0.5,
    }


def test_resumed_run_appends_lines(tmp_path: Path) -> None:
    for step in (10, 20):
        metrics = build(tmp_path)
        metrics.log_validation(step, {"": 1 / 3})
        metrics.close()
    lines = [(r["step"], r["validation_loss"], r["restarts"]) for r in records(tmp_path)]
    assert lines == [(10, 1 / 3, 0), (20, 1 / 3, 1)]


def test_only_the_writer_writes(tmp_path: Path, clock: Clock) -> None:
    metrics = build(tmp_path, is_writer=False)
    metrics.end_step(1, tokens=1, n_sequences=1, data_wait=0.0)
    clock.now += 1.0
    metrics.log(1, 1, VALUES)
    metrics.log_validation(1, {"": 0.5})
    metrics.close()
    assert list(tmp_path.iterdir()) == []


def test_first_step_and_multiples_of_log_freq_are_due(tmp_path: Path) -> None:
    metrics = build(tmp_path)
    assert [step for step in range(1, 31) if metrics.is_due(step)] == [1, 10, 20, 30]


def test_tensorboard_has_the_values_of_the_lines(tmp_path: Path, clock: Clock) -> None:
    metrics = build(tmp_path, tensorboard=True)
    for step in (1, 10):
        metrics.end_step(1, tokens=1000 * step, n_sequences=1, data_wait=0.5)
        clock.now += 2.0
        metrics.log(step, 10, VALUES | {"loss": 1.0 / step})
    metrics.log_validation(10, {"": 0.75})
    metrics.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    lines = records(tmp_path)
    # TensorBoard adds its own time.
    tags = {key for line in lines for key in line} - {"step", "time", "restarts"}
    assert set(events.Tags()["scalars"]) == tags
    for tag in tags:
        points = [(event.step, event.value) for event in events.Scalars(tag)]
        want = [(line["step"], pytest.approx(line[tag])) for line in lines if tag in line]
        assert points == want


def test_resumed_log_has_every_step_once(tmp_path: Path, clock: Clock) -> None:
    for resumed, steps in ((None, (10, 11, 12)), (10, (11, 13))):
        metrics = build(tmp_path, resumed_step=resumed, tensorboard=True)
        for step in steps:
            clock.now += 1.0
            metrics.end_step(1, tokens=1, n_sequences=1, data_wait=0.0)
            metrics.log(step, 100, VALUES)
        metrics.close()
    assert [record["step"] for record in records(tmp_path)] == [10, 11, 13]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [10, 11, 13]


def test_restarts_count_starts_whose_lines_were_replaced(tmp_path: Path, clock: Clock) -> None:
    for step in (10, 20, 20, 20):
        metrics = build(tmp_path, resumed_step=10 if step == 20 else None)
        clock.now += 1.0
        metrics.end_step(1, tokens=1, n_sequences=1, data_wait=0.0)
        metrics.log(step, 100, VALUES)
        metrics.close()
    assert [(r["step"], r["restarts"]) for r in records(tmp_path)] == [(10, 0), (20, 3)]


def test_nan_is_logged_as_null(tmp_path: Path, clock: Clock) -> None:
    metrics = build(tmp_path)
    clock.now += 1.0
    metrics.end_step(1, tokens=1, n_sequences=1, data_wait=0.0)
    metrics.log(10, 100, VALUES | {"loss": float("nan")})
    assert records(tmp_path)[0]["loss"] is None


@pytest.mark.parametrize("resumed", [None, 20])
@pytest.mark.parametrize("torn", ['{"step": 30, "lo', '{"step": 20}'])
def test_torn_line_loses_no_other_line(tmp_path: Path, resumed: int | None, torn: str) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 10}\n' + torn)
    build(tmp_path, resumed_step=resumed).write({"step": 40})
    steps = [record["step"] for record in records(tmp_path)]
    assert steps == ([10, 40] if "lo" in torn else [10, 20, 40])


def test_full_disk_is_one_alarm_and_leaves_no_torn_line(tmp_path: Path) -> None:
    metrics = build(tmp_path)
    metrics.write({"step": 1})
    size = (tmp_path / "metrics.jsonl").stat().st_size
    with patch.object(logger, "error") as alarm, patch.object(logger, "warning") as warning:
        # Ten bytes of a line have room.
        with file_size_limit(size + 10):
            metrics.write({"step": 2})
            metrics.write({"step": 3})
        metrics.write({"step": 4})
        metrics.write({"step": 5})
    assert alarm.call_count == 1
    assert "No space" in str(alarm.call_args) or "too large" in str(alarm.call_args)
    assert warning.call_args.args[-1] == 2
    assert [record["step"] for record in records(tmp_path)] == [1, 4, 5]
    metrics.close()


def test_full_disk_is_one_alarm_of_the_curves(tmp_path: Path) -> None:
    metrics = build(tmp_path, tensorboard=True)
    with (
        patch.object(SummaryWriter, "add_scalar", side_effect=OSError("disk full")),
        patch.object(logger, "error") as alarm,
        patch.object(logger, "warning") as warning,
    ):
        for step in (1, 2):
            metrics.write({"step": step, "loss": 1.0})
        metrics.close()
    assert alarm.call_count == 1
    assert "disk full" in str(alarm.call_args)
    assert warning.call_args.args[1:] == ("tensorboard", 2)
    assert [record["step"] for record in records(tmp_path)] == [1, 2]


@pytest.mark.parametrize("resumed", [None, 20])
@pytest.mark.parametrize(
    "bad", [b"\xff", b"[]", b"7", b'{"step": "abc"}', b'{"step": 10, "time": "abc"}', b"[" * 10**5]
)
def test_bad_line_is_moved_and_the_others_kept(
    tmp_path: Path, resumed: int | None, bad: bytes
) -> None:
    lines = [b'{"step": 10, "restarts": 2}', bad, b'{"step": 20}']
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
    with patch.object(logger, "warning") as warning:
        build(tmp_path, resumed_step=resumed).write({"step": 40})
    assert "1 damaged lines" in warning.call_args.args[0] % warning.call_args.args[1:]
    found = [(record["step"], record.get("restarts")) for record in records(tmp_path)]
    assert found == [(10, 2), (20, None), (40, 3)]
    (kept,) = tmp_path.glob("corrupt-metrics.jsonl-*")
    assert kept.read_bytes() == bad + b"\n"


def test_removed_folder_is_logged_and_made_again(tmp_path: Path) -> None:
    metrics = build(tmp_path / "run")
    metrics.write({"step": 1})
    (tmp_path / "run").rename(tmp_path / "other")
    with patch.object(logger, "error") as alarm:
        metrics.write({"step": 2})
        metrics.write({"step": 3})
    assert "was removed" in str(alarm.call_args)
    assert alarm.call_count == 1
    assert [record["step"] for record in records(tmp_path / "run")] == [2, 3]
    assert [record["step"] for record in records(tmp_path / "other")] == [1]
