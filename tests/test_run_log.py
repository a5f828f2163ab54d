"""Cost of metrics, trackers and console, as a share of a step."""

import json
import logging
import os
import pty
import re
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace
from typing import Any

import pytest

import metrics.logger
import run_summary
from launcher.console import DRAW_SECONDS
from launcher.screen import TerminalScreen
from metrics.planned_step import FIRST_STEPS
from metrics.tensorboard_tracker import TensorBoardTracker
from run_log import RunLog
from runtime.log import RECORD_MARK, RecordFormatter, init_logging, logger, read_record
from tests.lib.forked import codes, log, started
from tests.lib.launch import records
from train_step import TrainStep

LOG_FREQ = 10
# Sizes and keys of the default run.
DEFAULT = {
    "training.seq_len": "256",
    "training.local_batch_size": "8",
    "training.global_batch_size": "16",
    "training.dtype": "float32",
    "training.steps": "41",
    "lr_scheduler.total_steps": "41",
    "metrics.log_freq": str(LOG_FREQ),
    "metrics.trackers": '["tensorboard"]',
    "checkpoint.enable": "false",
}


def time_records(path: Path) -> None:
    """Write the CPU seconds of each step's records, and of each of TensorBoard's, to ``path``."""
    init_logging()
    times: dict[str, list[float]] = {"step": [], "tracker": [], "logged": [], "clock": []}

    def timed(function: Callable[..., Any], kind: Callable[..., str]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            result = function(*args, **kwargs)
            times[kind(*args)].append(time.thread_time() - begin)
            return result

        return call

    def kind_of(self: RunLog, step: int, *_: Any) -> str:
        times["clock"].append(time.process_time())
        return "logged" if self.is_due(step) else "step"

    def close(self: RunLog) -> None:
        closed(self)
        path.with_suffix(f".{os.environ['RANK']}").write_text(json.dumps(times))

    closed = RunLog.close
    RunLog.step = timed(RunLog.step, kind_of)  # type: ignore[method-assign]
    RunLog.close = close  # type: ignore[method-assign]
    TensorBoardTracker.log = timed(TensorBoardTracker.log, lambda *_: "tracker")  # type: ignore[method-assign]


def drawing_seconds(metrics: dict[str, Any]) -> tuple[float, float]:
    """CPU seconds of the launcher to draw the live line, and to show a logged step above it."""
    master, slave = pty.openpty()
    screen = TerminalScreen("run", slave)
    progress = {"step": metrics["step"], "steps": 1000, "activity": ""}
    found = []
    for level, event in (
        (logging.DEBUG, progress),
        (logging.INFO, {"metrics": metrics | {"seconds_left": 1.0}}),
    ):
        times = []
        for number in range(50):
            shown = event | ({"step": number} if level == logging.DEBUG else {})
            record = logging.makeLogRecord({"msg": "step", "levelno": level, "event": shown})
            line = RecordFormatter().format(record)
            begin = time.thread_time()
            screen.show([record for record in [read_record(line)] if record is not None])
            screen.tick()
            times.append(time.thread_time() - begin)
            os.read(master, 1 << 16)
        found.append(median(times))
    os.close(master)
    os.close(slave)
    return found[0], found[1]


def log_comparisons() -> None:
    """Log the steps at which a plan would be compared with the run."""
    compared: list[int] = []

    def step(self: RunLog, number: int, *args: Any, **values: Any) -> Any:
        compared.append(number)
        return stepped(self, number, *args, **values)

    def compare(self: RunLog, measured: dict[str, float]) -> None:
        logger.info("compared at step %d", compared[-1])

    stepped = RunLog.step
    RunLog.step = step  # type: ignore[method-assign]
    RunLog._compare_with_plan = compare  # type: ignore[method-assign]


def test_a_start_from_nothing_neither_diverges_nor_is_compared_in_its_ramp(tmp_path: Path) -> None:
    """An attempt without a checkpoint had low losses. The plan is of the batch after the ramp."""
    folder = tmp_path / "debug_model"
    folder.mkdir()
    dead = ({"step": step, "loss": 0.1} for step in range(1, 40))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in dead))
    keys = {"training.steps": "24", "metrics.log_freq": "1", "checkpoint.enable": "false"}
    keys["lr_scheduler.total_steps"] = "24"
    keys["training.batch_size_ramp"] = "[{steps = 4, global_batch_size = 2}]"
    with started(tmp_path, 1, plant=log_comparisons, **keys) as ranks:
        assert codes(ranks) == {0}, log(tmp_path)
    text = log(tmp_path)
    assert "diverges" not in text
    found = [int(step) for step in re.findall(r"compared at step (\d+)", text)]
    assert found == list(range(4 + FIRST_STEPS + 1, 25))


def sum_one() -> None:
    run_summary.MOST_BFLOAT16_SUMS = 1


@pytest.mark.parametrize("n_microbatches", [1, 2])
def test_many_sums_of_bfloat16_gradients_are_a_warning(n_microbatches: int, tmp_path: Path) -> None:
    keys = {
        "training.dtype": "bfloat16",
        "training.local_batch_size": "1", "training.global_batch_size": str(n_microbatches),
        "training.seq_len": "8", "training.steps": "1", "lr_scheduler.total_steps": "1",
        "checkpoint.enable": "false",
    }  # fmt: skip
    with started(tmp_path, 1, plant=sum_one, **keys) as ranks:
        assert codes(ranks) == {0}, log(tmp_path)
    text = f"gradients of {n_microbatches} microbatches are added in bfloat16"
    assert (text in log(tmp_path)) == (n_microbatches > 1)


def compile_for_an_hour() -> None:
    """Make the first step of a start take an hour, by the clock of metrics."""
    late = [0.0]

    def step(self: TrainStep, number: int, *args: Any) -> Any:
        late[0] = 3600.0
        return stepped(self, number, *args)

    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + late[0], time=time.time)
    stepped = TrainStep.__call__
    TrainStep.__call__ = step  # type: ignore[method-assign]
    metrics.logger.time = clock  # type: ignore[attr-defined]


def test_speed_after_a_resume_has_no_first_step(tmp_path: Path) -> None:
    for steps in ("3", "6"):
        keys = {"training.steps": steps, "lr_scheduler.total_steps": "6"}
        keys["metrics.log_freq"] = "10"
        with started(tmp_path, 1, plant=compile_for_an_hour, **keys) as ranks:
            assert codes(ranks) == {0}, log(tmp_path)
    lines = [line for line in records(tmp_path) if "loss" in line]
    assert [line["step"] for line in lines] == [1, 3, 6]
    assert [line["seconds_per_step"] > 600 for line in lines] == [True, False, False]


@pytest.mark.parametrize(
    "text",
    ["[1]", "1", '"text"', "{}", '{"msg": "text"}', '{"msg": 1, "levelno": "x", "created": 2}'],
)
def test_other_lines_with_the_mark_are_no_records(text: str) -> None:
    """A user's own program may print JSON text sequences (RFC 7464)."""
    assert read_record(RECORD_MARK + text) is None
    line = RecordFormatter().format(logging.makeLogRecord({"msg": "text", "levelno": 20}))
    found = read_record(line)
    assert found is not None
    assert found.getMessage() == "text"


@pytest.mark.slow
def test_log_trackers_and_console_cost_at_most_half_a_percent_of_a_step(
    tmp_path: Path, record_result: Callable[[str], None]
) -> None:
    with started(tmp_path, 2, plant=partial(time_records, tmp_path / "times"), **DEFAULT) as ranks:
        assert codes(ranks) == {0}, log(tmp_path)
    times = json.loads((tmp_path / "times.0").read_text())
    # Of the CPU too, because other programs may run.
    step = median(end - begin for begin, end in pairwise(times["clock"]))
    # The first one makes what the others find.
    logged = mean(times["logged"][1:]) + mean(times["tracker"][1:])
    live_line, shown = drawing_seconds(records(tmp_path)[-1])
    share = (mean(times["step"]) + (logged + shown) / LOG_FREQ) / step + live_line / DRAW_SECONDS
    record_result(
        f"of a step with {1000 * step:.0f} ms of CPU time: {1e6 * mean(times['step']):.0f} µs, and"
        f" {1000 * logged:.2f} ms if it is logged; of the launcher {1000 * shown:.2f} ms for that,"
        f" and {1000 * live_line:.2f} ms four times a second: together {100 * share:.2f} %"
    )
    assert share < 0.005
