"""Plan the measured rows of single GPUs: ``python -m benchmarks.planned``

Renders the table of docs/planning.md from benchmarks/results. Takes a minute.
"""

import re
from pathlib import Path

from benchmarks.loops import Case, keys_of
from benchmarks.rows import ROOT, newest, read_rows
from benchmarks.run import build_case, load_cases
from config import ConfigError, load_config
from planner.roofline import step_time
from planner.step_plan import plan_step
from run_spec import resolve
from runtime.devices import find_hardware

PAGE = ROOT / "docs" / "planning.md"
MARKED = re.compile(r"(<!-- measured rows -->\n).*?(<!-- end of measured rows -->)", re.DOTALL)
DEVICES = ("h200", "h100")
# Cases to whose rows the constants of planner/roofline.py are fitted.
FITTED = {
    "h200": (
        "124M, 2k", "124M, 2k, eager", "124M, 2k, batch 4", "1B, 8k", "3B, 8k",
        "8B, 8k, bfloat16 weights", "8B, 8k, float32 weights, bfloat16 moments",
    ),
    "h100": (
        "8B, 8k, bfloat16 weights, selective recomputation", "3B, 8k, selective recomputation",
    ),
}  # fmt: skip
GIB = 1 << 30
HEAD = (
    "| row | fitted | tokens/s | planned | error | GiB | planned, eager |\n"
    "|---|---|---:|---:|---:|---:|---:|\n"
)


def table() -> str:
    """Table of the newest rows of all cases that can be planned."""
    lines = []
    for device in DEVICES:
        rows = newest(read_rows(ROOT / "benchmarks" / "results" / f"{device}.jsonl"))
        cases = {case["name"]: case for case in load_cases(device, {})}
        for row in (row for row in rows if row["what"] == "train" and row["tokens_per_second"]):
            found, name = row["tokens_per_second"], row["case"]
            if name not in cases:
                continue  # A trial, or a case that was renamed.
            plan = planned(build_case(cases[name]), device)
            if plan is None:
                continue
            rate, peak = plan
            lines.append(
                f"| {device.upper()}, {name} | {'yes' if name in FITTED[device] else ''} |"
                f" {found:,.0f} | {rate:,.0f} | {100 * (rate / found - 1):+.1f} % |"
                f" {row['peak_memory_gib']:.1f} | {peak / GIB:.1f} |"
            )
    return HEAD + "\n".join(lines) + "\n"


def planned(case: Case, device: str) -> tuple[float, int] | None:
    """Return tokens/s and the peak of ``case``; None if it is not planned yet."""
    texts = [f"--{key}={text}" for key, text in keys_of(case).items()]
    run = resolve(load_config(Path("debug_model"), texts), 1, has_gpu=True)
    try:
        plan = plan_step(run, 1)
    except ConfigError:
        return None
    rate = step_time(plan, find_hardware(device, None)).tokens_per_second
    return rate, plan.stages[0].record.peak


def main() -> None:
    PAGE.write_text(MARKED.sub(lambda m: f"{m[1]}\n{table()}\n{m[2]}", PAGE.read_text()))


if __name__ == "__main__":
    main()
