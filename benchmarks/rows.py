"""Result rows of benchmarks: common fields, JSON lines file and Markdown table.

Imports only the standard library, because it runs before packages are installed.
"""

import json
import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
Row = dict[str, Any]
# Overrides of a configuration's keys.
Keys = dict[str, str | int | float | bool | list[str]]
# Fields of every row; None if a benchmark does not measure one.
MEASURED = (
    "tokens_per_second", "mfu_palm", "mfu_causal", "peak_memory_gib", "compile_seconds",
    "first_step_seconds", "problem",
)  # fmt: skip
MACHINE = ("device", "amx", "cores", "torch", "python")


def environment(commit: str | None) -> Row:
    """Fields that say where and when a row was measured."""
    import torch  # Takes a second; tables do not need it.

    from runtime.compat import find

    has_gpu = torch.cuda.is_available()
    has_amx = find("torch.cpu:_is_amx_tile_supported")
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit or commit_here(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if has_gpu else f"CPU: {cpu_name()}",
        "cpu": cpu_name(),
        "amx": has_amx and has_amx(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
    }


def commit_here() -> str | None:
    """Short hash of HEAD, with a + if files that a benchmark may depend on have changed."""
    found = _git("rev-parse", "--short=10", "HEAD")
    changed = _git("status", "--porcelain", "--", ":!docs", ":!tests", ":!benchmarks/results")
    return f"{found.strip()}{'+' if changed else ''}" if found else None


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """CPU name and, on Linux, family and model, because virtual machines often hide the model."""
    try:
        first = cpuinfo.read_text().partition("\n\n")[0]
    except OSError:
        first = ""
    lines = (line.partition(":") for line in first.splitlines())
    fields = {key.strip(): value.strip() for key, _, value in lines}
    name = fields.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in fields and "model" in fields:
        name += f", family {fields['cpu family']} model {fields['model']}"
    return name


def read_rows(path: Path) -> list[Row]:
    """Read all rows of a file; skip torn lines. Empty if the file is missing."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Append ``rows``; a killed process leaves at most one torn line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_torn = path.exists() and path.read_text()[-1:] not in ("\n", "")
    with path.open("a") as file:
        file.write("\n" * is_torn + "".join(json.dumps(row) + "\n" for row in rows))


def is_measured(rows: list[Row], name: str, settings: Row, here: Row) -> bool:
    """True if ``rows`` contain all results of this case from the same commit and an equal machine.

    A case has a row for each of what it measures. One that failed, or lacked a package, is none.
    """
    if here["commit"] is not None and here["commit"].endswith("+"):
        return False  # The changes may be others by now.
    same = {"config": name, "settings": settings}
    same |= {key: here[key] for key in (*MACHINE, "commit")}
    found = {row["what"]: row for row in rows if same.items() <= row.items()}
    return bool(found) and not any(is_failed(row) or lacks_package(row) for row in found.values())


def is_failed(row: Row) -> bool:
    """True if the row has a problem, other than that a package is missing."""
    return bool(row["problem"]) and not row["problem"].startswith("skipped")


def lacks_package(row: Row) -> bool:
    return bool(row["problem"]) and row["problem"].endswith("not installed")


def newest(rows: Iterable[Row]) -> list[Row]:
    """Last row of each (config, case, what, machine), in file order."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = tuple(row[k] for k in ("config", "case", "what", *MACHINE))
        found.pop(key, None)
        found[key] = row
    return list(found.values())


def tables(rows: list[Row], columns: list[str]) -> str:
    """Render one Markdown table per machine, with the origin of its rows above it."""
    by_machine: dict[tuple[Any, ...], list[Row]] = {}
    for row in newest(rows):
        by_machine.setdefault(tuple(row[k] for k in MACHINE), []).append(row)
    return "\n\n".join(_table(own, columns) for own in by_machine.values())


def _table(rows: list[Row], columns: list[str]) -> str:
    names = [*columns, *["problem"] * any(row["problem"] for row in rows)]
    lines = [[heading(name) for name in names]]
    texts = {name: isinstance(shown_value(rows, name), str | None) for name in names}
    lines.append(["---" if texts[name] else "---:" for name in names])
    lines += [[shown(name, row.get(name)) for name in names] for row in rows]
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n".join(f"{text}  " for text in dict.fromkeys(map(origin, rows))) + f"\n\n{body}"


def shown_value(rows: list[Row], name: str) -> Any:
    return next((row[name] for row in rows if row.get(name) is not None), None)


def origin(row: Row) -> str:
    amx = " with AMX" if row["amx"] else ""
    versions = f"torch {row['torch']}, Python {row['python']}"
    commit = f"commit {row['commit']}" if row["commit"] else "no commit"
    machine = f"{row['device']}{amx}, {row['cores']} cores"
    return f"{machine}; {versions}; {commit}, {row['date']}:"


def heading(name: str) -> str:
    return name.replace("_per_second", "/s").replace("_", " ")


def shown(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str | bool):
        return str(value)
    if name.startswith(("mfu", "share")):
        return f"{value:.2%}" if value < 0.01 else f"{value:.1%}"
    if name.startswith("loss"):
        return f"{value:.7f}"
    return f"{value:,.0f}" if abs(value) >= 1000 or isinstance(value, int) else f"{value:.3g}"
