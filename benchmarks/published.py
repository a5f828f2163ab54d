"""Plan published runs: ``python -m benchmarks.published [--plan]``

Renders the table of docs/planning.md from benchmarks/published_plans.jsonl, which ``--plan``
makes again from benchmarks/published.toml.
"""

import argparse
import json
import re
import tempfile
import tomllib
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.rows import ROOT
from config import load_config
from planner.roofline import step_time
from planner.step_plan import plan_step
from run_spec import resolve
from runtime.devices import find_hardware
from runtime.machine import available_cpus

RUNS = ROOT / "benchmarks" / "published.toml"
RESULTS = ROOT / "benchmarks" / "published_plans.jsonl"
PAGE = ROOT / "docs" / "planning.md"
MARKED = re.compile(r"(<!-- published runs -->\n).*?(<!-- end of published runs -->)", re.DOTALL)
GIB = 1 << 30
# Keys of a run that its plan repeats.
SAME = ("system", "title", "device", "world_size")
# torchtitan's loss of 2024 is cross entropy of logits that are cast to float32. It holds a copy,
# its log-softmax and its gradient, of 4 bytes each, besides the logits that ours holds.
FLOAT32_LOSS, LOSS_BYTES = "llama3_h100_202412_torchtitan.md", 12
HEAD = (
    "| system | run | device | tokens/s | planned | error | with its share | GiB | our tensors"
    " | with its loss |\n|---|---|---|---:|---:|---:|---:|---:|---:|---:|\n"
)


def planned(run: dict[str, Any], devices: Path) -> dict[str, Any]:
    """Return tokens/s of a device and the peak of a rank of one published run."""
    keys = {"training.steps": 100} | run["keys"]
    texts = [f"--{key}={value if isinstance(value, str) else json.dumps(value)}"
             for key, value in keys.items()]  # fmt: skip
    n = run["world_size"]
    plan = plan_step(resolve(load_config(Path("debug_model"), texts), n, has_gpu=True), n)
    time = step_time(plan, find_hardware(run["device"], devices))
    peak = max(stage.record.peak for stage in plan.stages)
    return {
        **{key: run[key] for key in SAME},
        "tokens_per_second": time.tokens_per_second / n,
        "peak_gib": peak / GIB,
        "parts": {part: round(seconds, 4) for part, seconds in time.parts.items()},
    }


def make_results() -> None:
    """Plan all runs again. Writes ``RESULTS``."""
    text = RUNS.read_text()
    with tempfile.TemporaryDirectory() as folder:
        devices = Path(folder) / "devices.toml"
        devices.write_text(text[text.index("[devices.") :])
        runs = tomllib.loads(text)["rows"]
        with ProcessPoolExecutor(available_cpus(), mp_context=get_context("spawn")) as pool:
            results = list(pool.map(partial(planned, devices=devices), runs))
    RESULTS.write_text("".join(f"{json.dumps(result)}\n" for result in results))


def table() -> str:
    """Table of all runs, and their median errors."""
    runs = tomllib.loads(RUNS.read_text())["rows"]
    results = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    ratios = defaultdict[str, list[float]](list)
    for run, result in zip(runs, results, strict=True):
        assert all(run[key] == result[key] for key in SAME), f"run with --plan: {run['title']}"
        ratios[run["system"]].append(run["tokens_per_second"] / result["tokens_per_second"])
    shares = {system: median(found) for system, found in ratios.items()}
    lines, errors, rest, of_tensors, of_both, of_loss = [], [], [], [], [], []
    for run, result in zip(runs, results, strict=True):
        found, rate, gib = run["tokens_per_second"], result["tokens_per_second"], result["peak_gib"]
        errors.append(rate / found - 1)
        scaled = rate * shares[run["system"]] / found - 1
        if len(ratios[run["system"]]) > 1:
            rest.append(scaled)
        known = run.get("memory_gib")
        total = gib + float32_loss(run) / GIB
        if known:
            of_tensors.append(gib / known - 1)
            of_both.append(total / known - 1)
        if known and total > gib:
            of_loss.append(total / known - 1)
        device = f"{run['world_size']} {run['device'].partition('_')[0].upper()}"
        lines.append(
            f"| {run['system']} | {run['title']} | {device} | {found:,} | {rate:,.0f} |"
            f" {100 * errors[-1]:+.1f} % | {100 * scaled:+.1f} % | {known or ''} | {gib:.1f} |"
            f" {f'{total:.1f}' if total > gib else ''} |"
        )
    listed = ", ".join(f"{system} {share:.2f}" for system, share in shares.items())
    summary = (
        f"Median error of {len(lines)} runs: tokens/s {_median(errors)}, and {_median(rest)} with"
        f" one share for each system of several runs. Memory of {len(of_tensors)} runs: our tensors"
        f" {_median(of_tensors)}; with the loss of those that have another one {_median(of_both)},"
        f" and of these {len(of_loss)} alone {_median(of_loss)}."
    )
    return HEAD + "\n".join(lines) + f"\n\n{summary} Shares: {listed}.\n"


def float32_loss(run: dict[str, Any]) -> float:
    """Bytes that the loss of the run's system holds more than ours, where both peaks have it.

    In a pipeline, the peak is that of another stage.
    """
    keys, parallelism = run["keys"], "parallelism.{}_parallel_degree"
    degrees = {
        name: keys.get(parallelism.format(name), 1) for name in ("tensor", "context", "pipeline")
    }
    if not run["source"].endswith(FLOAT32_LOSS) or degrees["pipeline"] > 1:
        return 0.0
    tokens = keys["training.local_batch_size"] * keys["training.seq_len"] / degrees["context"]
    return LOSS_BYTES * tokens * keys["model.vocab_size"] / degrees["tensor"]


def _median(errors: list[float]) -> str:
    return f"{100 * median(map(abs, errors)):.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", action="store_true")
    if parser.parse_args().plan:
        make_results()
    PAGE.write_text(MARKED.sub(lambda m: f"{m[1]}\n{table()}\n{m[2]}", PAGE.read_text()))


if __name__ == "__main__":
    main()
