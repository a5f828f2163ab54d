"""Run folders with made-up metrics: of any length, with spikes, restarts and hostile texts."""

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from config import JobConfig, dump_toml

BEGIN, SECONDS, TOKENS = 1.8e9, 0.5, 4096


def training_line(step: int, noise: random.Random, **values: Any) -> dict[str, Any]:
    """A line such as metrics/logger.py writes."""
    rate = TOKENS / SECONDS * (1 + noise.gauss(0, 0.03))
    return {
        "step": step,
        "loss": 1.8 + 4.6 * math.exp(-step / 4000) + 0.5 / (1 + step / 50) + noise.gauss(0, 0.05),
        "grad_norm": 0.3 + abs(noise.gauss(0, 0.08)),
        "lr": 3e-3 * min(step / 20, 1.0),
        "tokens": TOKENS * step,
        "skipped_steps": 0,
        "bad_records": 0,
        "seconds_per_step": TOKENS / rate,
        "tokens_per_second": rate,
        "mfu": 0.4 * rate * SECONDS / TOKENS,
        "mfu_causal": 0.37 * rate * SECONDS / TOKENS,
        "memory_gib": 61.5,
        "data_wait": abs(noise.gauss(0, 0.002)),
        "expert_load": 1.2 + abs(noise.gauss(0, 0.1)),
        "slowest_rank": 3,
        "slowest_over_median": 1 + abs(noise.gauss(0, 0.02)),
        "time": BEGIN + SECONDS * step,
        "restarts": 0,
    } | values


def lines_of(n_steps: int, *, validation_freq: int = 1000) -> Iterator[dict[str, Any]]:
    """Lines of every step, and of validations."""
    noise = random.Random(0)
    for step in range(1, n_steps + 1):
        yield training_line(step, noise)
        if step % validation_freq == 0:
            loss = 2.0 + 4.0 * math.exp(-step / 4000)
            time = BEGIN + SECONDS * step
            yield {"step": step, "validation_loss": loss, "time": time, "restarts": 0}


def write_run(folder: Path, lines: Iterator[dict[str, Any]] | list[dict[str, Any]]) -> Path:
    """Make a run's folder with ``lines`` of metrics and a configuration; return it."""
    (folder / "control").mkdir(parents=True)
    (folder / "control" / "lock").write_text("1 on elsewhere\n")
    (folder / "control" / "outcome").write_text("done\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tables = JobConfig().model_dump()
    tables["training"]["global_batch_size"] = 16
    (folder / "config.toml").write_text(dump_toml(JobConfig.model_validate(tables)))
    return folder
