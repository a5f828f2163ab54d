"""Time from ``./run_train.sh`` to the end of the first step, and time of imports."""

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from pydantic import Field

from benchmarks.rows import ROOT, Keys, Row
from config.job_config import Count, Section


class Case(Section):
    ranks: list[Count]
    imports: list[str]
    repetitions: Count
    """Runs of which the fastest counts, after one that warms the file cache."""
    keys: Keys = Field(default_factory=dict)
    """Overrides of train.py's default run."""


def run(case: Case) -> Iterator[Row]:
    """Yield a row per number of ranks and per imported module."""
    for ranks in case.ranks:
        found = [first_step(ranks, case) for _ in range(case.repetitions + 1)][1:]
        seconds, cpu = (min(kind) for kind in zip(*found, strict=True))
        what = f"run_train.sh, {ranks} rank{'s' * (ranks > 1)}"
        yield {"what": what, "first_step_seconds": seconds, "cpu_seconds": cpu}
    for module in case.imports:
        found = [import_seconds(module) for _ in range(case.repetitions + 1)][1:]
        seconds, cpu = (min(kind) for kind in zip(*found, strict=True))
        yield {"what": f"import {module}", "seconds": seconds, "cpu_seconds": cpu}


def first_step(ranks: int, case: Case) -> tuple[float, float]:
    """Seconds to the log line of the first step, and CPU seconds of all processes of the run."""
    with tempfile.TemporaryDirectory() as folder:
        keys = {"training.steps": 1, "job.output_dir": folder, **case.keys}
        arguments = [f"--{key}={value}" for key, value in keys.items()]
        environment = {"NGPU": str(ranks), "PYTHON": sys.executable, "PYTHONUNBUFFERED": "1"}
        before, begin = children_cpu(), time.perf_counter()
        process = subprocess.Popen(
            [ROOT / "run_train.sh", *arguments],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if "step     1  loss" in line:
                seconds = time.perf_counter() - begin
                process.communicate()
                return seconds, children_cpu() - before
    raise RuntimeError(f"the run failed: {''.join(lines[-3:])}")


def import_seconds(module: str) -> tuple[float, float]:
    """Wall and CPU seconds of importing ``module`` in a new process."""
    before, begin = children_cpu(), time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {module}"], cwd=ROOT, check=True)
    return time.perf_counter() - begin, children_cpu() - before


def children_cpu() -> float:
    """CPU seconds of all finished child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
