import gzip
import json
from pathlib import Path

import pytest
import torch

from config.job_config import Profiling
from metrics.profiling import profiler


def run_steps(folder: Path, steps: range, **config: bool | int) -> list[str]:
    with profiler(folder, Profiling(**config), rank=3) as finish_step:
        for step in steps:
            torch.ones(4, 4) @ torch.ones(4, 4)
            finish_step(step)
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_traces_are_named_after_steps_of_the_run(tmp_path: Path) -> None:
    # A resumed run: not the first steps of the run.
    names = run_steps(tmp_path, range(101, 109), enable_trace=True, trace_freq=4)
    assert names == [f"trace-step-{step:08d}-rank3.json.gz" for step in (104, 108)]
    with gzip.open(tmp_path / names[0]) as file:
        events = json.load(file)["traceEvents"]
    traced = [event["name"] for event in events]
    assert traced.count("aten::mm") == 2, "the last 2 steps of 4"


def test_nothing_written_unless_enabled(tmp_path: Path) -> None:
    assert run_steps(tmp_path / "traces", range(1, 9), trace_freq=4) == []
    assert not (tmp_path / "traces").exists()
