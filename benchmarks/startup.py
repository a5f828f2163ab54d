"""Time from ``./run_train.sh`` to the end of the first step, and imports' part of it."""

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from pydantic import Field

from benchmarks.rows import ROOT, Row
from config.job_config import Count, Section


class Case(Section):
    ranks: list[Count]
    imports: list[str]
    repetitions: Count
    """The fastest counts; one more comes first, to warm the file cache, and does not."""
    keys: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Keys of train.py that differ from its default run."""


def run(case: Case) -> Iterator[Row]:
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
    """Seconds to the line of the first step, and CPU seconds of all processes of the whole run."""
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
        seen: list[str] = []
        for line in process.stdout:
            seen.append(line)
            if "step     1  loss" in line:
                seconds = time.perf_counter() - begin
                process.communicate()
                return seconds, children_cpu() - before
    raise RuntimeError(f"the run failed: {''.join(seen[-3:])}")


def import_seconds(module: str) -> tuple[float, float]:
    before, begin = children_cpu(), time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {module}"], cwd=ROOT, check=True)
    return time.perf_counter() - begin, children_cpu() - before


def children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
