"""Step time of one rank of several threads, alone and beside busy processes, by spin count.

OpenMP's threads spin at each barrier before they sleep. On a busy machine the thread that they wait
for may not be running, and spinning keeps the processor that it needs.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from benchmarks.rows import Keys, Row
from config.job_config import Count, Section
from shardloom import train

# The first steps also warm up.
WARMUP = 3


class Case(Section):
    spin_counts: list[int]
    """Values of GOMP_SPINCOUNT, the spins before a thread sleeps."""
    busy: list[int]
    """Numbers of processes that compute beside the run."""
    steps: Count
    keys: Keys = Field(default_factory=dict)
    """Overrides of train.py's default run."""


def run(case: Case) -> Iterator[Row]:
    """Yield a row per number of busy processes and spin count."""
    for n_busy in case.busy:
        for spins in case.spin_counts:
            seconds = step_seconds(case, spins, n_busy)
            what = f"{n_busy} busy processes, GOMP_SPINCOUNT={spins}"
            yield {"what": what, "seconds": statistics.median(seconds)}


def step_seconds(case: Case, spins: int, n_busy: int) -> list[float]:
    """Seconds of each step after ``WARMUP``."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n_busy)]
    with tempfile.TemporaryDirectory() as folder:
        keys = {"training.steps": case.steps + WARMUP, "job.output_dir": folder, **case.keys}
        os.environ["GOMP_SPINCOUNT"] = str(spins)
        try:
            train("debug_model", keys, ngpu=1, show=False)
        finally:
            for process in others:
                process.kill()
                process.wait()
        lines = Path(folder, "debug_model", "metrics.jsonl").read_text().splitlines()
    found = [line["seconds_per_step"] for line in map(json.loads, lines) if "loss" in line]
    return found[WARMUP:]
