"""Traces hold whole training steps and nothing else, whatever happens between them."""

import gzip
import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from config.job_config import Profiling
from metrics import profiling
from metrics.profiling import StepProfiler
from metrics.trace_file import read_trace
from metrics.trace_summary import summarize
from runtime.control import SNAPSHOT, TRACE
from runtime.log import logger
from tests.lib.control import control_of
from tests.lib.patience import PATIENCE_SECONDS
from tests.lib.ranks import RankPool
from tests.lib.repository import ROOT
from tests.lib.traces import run_steps


def traced(path: Path) -> list[str]:
    with gzip.open(path) as file:
        return [event["name"] for event in json.load(file)["traceEvents"]]


def name_of(step: int) -> str:
    return f"trace-step-{step:08d}-rank3.json.gz"


def test_traces_are_of_the_steps_in_their_names(tmp_path: Path) -> None:
    # A resumed run: not the first steps of the run.
    names = run_steps(tmp_path / "traces", range(102, 109), enable_trace=True, trace_freq=4)
    assert names == [name_of(104), name_of(108)]
    found = traced(tmp_path / "traces" / names[1])
    assert [name for name in found if name.startswith("ProfilerStep")] == [
        "ProfilerStep#107",
        "ProfilerStep#108",
    ]
    assert found.count("aten::mm") == 2
    assert found.count("validation") == 1, "that between the steps; not that after the last"


@pytest.mark.parametrize("last_step", [5, 6, 7])
def test_a_run_that_ends_within_a_trace_writes_none(tmp_path: Path, last_step: int) -> None:
    names = run_steps(tmp_path / "traces", range(1, last_step + 1), enable_trace=True, trace_freq=4)
    assert names == [name_of(4)]


def test_what_is_between_the_steps_does_not_count(tmp_path: Path) -> None:
    names = run_steps(tmp_path / "traces", range(1, 5), enable_trace=True, trace_freq=4)
    summary = summarize(read_trace(tmp_path / "traces" / names[0]), n_top=50)
    assert summary.steps == (3, 4)
    assert summary.between["validation"] > 0.0
    assert "aten::mul" not in {each.name for each in summary.top}
    counts = {each.name: each.count for each in summary.top}
    assert counts["aten::mm"] == 2


def test_steps_that_a_rollback_repeats_are_in_no_trace(tmp_path: Path) -> None:
    """After step 7, in the middle of a trace, the run goes back to step 5."""
    steps = [*range(1, 8), *range(5, 9)]
    names = run_steps(tmp_path / "traces", steps, enable_trace=True, trace_freq=4)
    assert names == [name_of(4), name_of(8)]
    assert traced(tmp_path / "traces" / names[1]).count("aten::mm") == 2


@pytest.mark.parametrize("went_back_in", [6, 7])
def test_a_spike_within_a_trace_discards_it(tmp_path: Path, went_back_in: int) -> None:
    """A step that is rolled back begins, but does not end."""
    with closing(StepProfiler(tmp_path, Profiling(enable_trace=True, trace_freq=4), rank=3)) as own:
        for step in range(1, went_back_in):
            own.begin_step(step)
            own.end_step(step)
        own.begin_step(went_back_in)
        for step in range(5, 9):
            own.begin_step(step)
            own.end_step(step)
    assert [
        name for name in traced(tmp_path / "traces" / name_of(8)) if name.startswith("ProfilerS")
    ] == [
        "ProfilerStep#7",
        "ProfilerStep#8",
    ]


def test_nothing_written_unless_enabled(tmp_path: Path) -> None:
    assert run_steps(tmp_path / "traces", range(1, 9)) == []
    assert not (tmp_path / "traces").exists()


def test_a_requested_trace_begins_two_steps_later(tmp_path: Path) -> None:
    assert run_steps(tmp_path / "traces", range(1, 12), requests={3: {TRACE}}) == [name_of(6)]


def test_a_snapshot_needs_a_gpu(tmp_path: Path) -> None:
    with patch.object(logger, "warning") as warning:
        assert run_steps(tmp_path / "traces", range(1, 5), requests={2: {SNAPSHOT}}) == []
    assert "requires a CUDA device" in str(warning.call_args)


def test_a_requested_snapshot_records_one_step(tmp_path: Path) -> None:
    """With stand-ins for the functions that need CUDA."""
    calls: list[str] = []

    def find(path: str):
        def call(*arguments: str, **options: object) -> None:
            calls.append(path.rpartition(":")[2])
            for name in arguments:
                Path(name).write_text("")

        return call

    with (
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(profiling, "find", find),
    ):
        names = run_steps(tmp_path / "traces", range(1, 6), requests={2: {SNAPSHOT}})
    assert names == ["memory-step-00000003-rank3.pickle"]
    assert calls == ["_record_memory_history", "_dump_snapshot", "_record_memory_history"]


def test_the_log_says_how_to_read_a_trace(tmp_path: Path) -> None:
    with patch.object(logger, "info") as info:
        run_steps(tmp_path / "run" / "traces", range(1, 4), enable_trace=True, trace_freq=3)
    text = info.call_args.args[0] % info.call_args.args[1:]
    assert str(tmp_path / "run" / "traces" / name_of(3)) in text
    assert f"profile {tmp_path / 'run'}; timeline: ui.perfetto.dev" in text


def test_kineto_prints_nothing(tmp_path: Path) -> None:
    """In a process of its own, because Kineto reads its log level once."""
    code = (
        "import sys; from pathlib import Path; from tests.lib.traces import run_steps;"
        "print(run_steps(Path(sys.argv[1]), range(1, 4), enable_trace=True, trace_freq=3))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "traces")]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert (done.stdout, done.stderr) == (f"{[name_of(3)]}\n", "")


def wanted_by_step(folder: Path) -> list[list[str]]:
    """Requests that this rank sees in each step; rank 0 makes them before the second."""
    import torch.distributed as dist

    found = []
    with control_of(folder) as run:
        for step in range(3):
            if step == 1 and dist.get_rank() == 0:
                (folder / TRACE).touch()
                (folder / SNAPSHOT).touch()
            # The first as in a validation between two steps.
            run.all_reduce_counts()
            run.all_reduce_counts()
            found.append(sorted(run.take_wanted()))
    return found


def test_all_ranks_see_a_request_in_the_same_step(tmp_path: Path, ranks: RankPool) -> None:
    found = ranks.run(wanted_by_step, 2, tmp_path / "run" / "control")
    assert found == [[[], [SNAPSHOT, TRACE], []]] * 2
    assert not (tmp_path / "run" / "control" / TRACE).exists()
