"""Run a benchmark: ``python -m benchmarks.run NAME [--out FILE] [--key value ...]``

NAME is a file of benchmarks/configs. Its ``[[cases]]`` run in order, each merged with ``[common]``.
Overrides set a key in all cases: ``--turns 5``, ``--shape.n_layers 2``, ``--keys.compile.enable
true``. Rows are appended to FILE after each case. Cases with a result in FILE from this commit and
machine are skipped, so the same command resumes an interrupted run, and tries failed cases again.
Of uncommitted changes nothing is skipped.
"""

import argparse
import difflib
import pkgutil
import sys
import tempfile
import time
import tomllib
import traceback
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch

from benchmarks.rows import (
    MEASURED,
    ROOT,
    Row,
    append_rows,
    environment,
    is_failed,
    is_measured,
    read_rows,
)
from benchmarks.table import CONFIGS, table_of
from runtime.printable import error_line
from runtime.torch_device import enable_expandable_segments

BENCHMARKS = ("ceilings", "checkpoint", "data", "loss", "sharding", "spinning", "startup", "step")


def main(arguments: list[str]) -> int:
    """Run all cases; return 0, 1 if some failed, 2 for a bad command, 3 if the budget ran out."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", help=", ".join(sorted(path.stem for path in CONFIGS.glob("*"))))
    parser.add_argument("--out", type=Path, help="rows; default outputs/benchmarks/NAME.jsonl")
    parser.add_argument(
        "--only", default="", help="run the case of this name, or all that contain it"
    )
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds for all cases")
    parser.add_argument("--commit", help="commit of the rows, if there is no git")
    parser.add_argument("--packages", type=Path, help="folder of packages or wheels to import from")
    options, overrides = parser.parse_known_args(arguments)
    deadline = time.monotonic() + options.budget
    enable_expandable_segments()
    with tempfile.TemporaryDirectory() as scratch:
        if options.packages:
            add_packages(options.packages, Path(scratch))
        try:
            cases = load_cases(options.name, parse_overrides(overrides))
            chosen = choose_cases(cases, options.only)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        out = options.out or ROOT / "outputs" / "benchmarks" / f"{options.name}.jsonl"
        here, is_interrupted, has_failed = environment(options.commit), False, False
        for case in chosen:
            if is_measured(read_rows(out), options.name, case, here):
                print(f"{case['name']}: already in {out}", flush=True)
                continue
            rows = run_case(case, deadline)
            if rows is None:
                is_interrupted = True
                print(f"{case['name']}: budget exhausted; the same command resumes", flush=True)
                break
            # Tables show a trial beside the case, not in its place.
            title = " ".join([case["name"], *overrides])
            fields = {"config": options.name, "case": title, "what": ""} | here
            whole = fields | dict.fromkeys(MEASURED) | {"settings": case}
            append_rows(out, rows := [whole | row for row in rows])
            problems = [row["problem"] for row in rows if is_failed(row)]
            has_failed |= bool(problems)
            result = f"failed: {'; '.join(problems)}" if problems else "done"
            print(f"{case['name']}: {result}", flush=True)
    print(f"\n{table_of(out)}\n\nrows: {out}")
    return 3 if is_interrupted else int(has_failed)


def run_case(settings: Row, deadline: float) -> list[Row] | None:
    """Run a case; return its rows, one row with the problem if it failed, None if out of time."""
    left = deadline - time.monotonic()
    if left <= 1:
        return None
    case, run = build_case(settings), pkgutil.resolve_name(f"{module_of(settings)}:run")
    if hasattr(case, "limit_seconds") and case.limit_seconds > left:
        case = case.model_copy(update={"limit_seconds": int(left)})
    try:
        return list(run(case))
    except Exception as error:
        if isinstance(error, TimeoutError) and time.monotonic() >= deadline - 1:
            return None
        traceback.print_exc()
        return [{"problem": (getattr(error, "problem", None) or error_line(error))[:200]}]
    finally:
        # Loops run in their own processes and need the whole GPU.
        torch.cuda.empty_cache()


def load_cases(name: str, overrides: Row) -> list[Row]:
    """Load, merge and validate all cases of a config; raise ``ValueError`` if one is invalid."""
    path = CONFIGS / f"{name}.toml"
    known = sorted(file.stem for file in CONFIGS.glob("*.toml"))
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{name!r} is not a benchmark: {', '.join(known)}{hint}")
    try:
        tables = tomllib.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if unknown := tables.keys() - {"columns", "common", "cases"}:
        raise ValueError(f"{path}: {', '.join(sorted(unknown))}: not columns, common or cases")
    if missing := {"columns", "cases"} - tables.keys():
        raise ValueError(f"{path}: no {' and no '.join(sorted(missing))}")
    merged = [whole_case(case, tables.get("common", {}), overrides) for case in tables["cases"]]
    names = [case.get("name") for case in merged]
    if None in names or len(set(names)) < len(names):
        raise ValueError(f"{path}: every case needs a unique name")
    for case in merged:
        try:
            build_case(case)
        except ValueError as error:
            raise ValueError(f"{path}: case {case['name']!r}: {error}") from None
    return merged


def choose_cases(cases: list[Row], name: str) -> list[Row]:
    """The case of this name, or all that contain it. Raises ``ValueError`` if there is none."""
    named = [case for case in cases if case["name"] == name]
    if found := named or [case for case in cases if name in case["name"]]:
        return found
    names = ", ".join(repr(case["name"]) for case in cases)
    raise ValueError(f"--only {name}: no such case; there are: {names}")


def whole_case(case: Row, common: Row, overrides: Row) -> Row:
    """Merge ``[common]`` and the overrides into a case, unless it is of another benchmark."""
    is_other = case.get("benchmark", common.get("benchmark")) != common.get("benchmark")
    return case if common and is_other else merge(merge(common, case), overrides)


def build_case(settings: Row) -> Any:
    """Build the ``Case`` of a benchmark; raise ``ValueError`` with all errors on one line."""
    fields = {k: v for k, v in settings.items() if k not in ("name", "benchmark")}
    from pydantic import ValidationError  # Only here, because --packages may bring it.

    try:
        return pkgutil.resolve_name(f"{module_of(settings)}:Case")(**fields)
    except ValidationError as error:
        found = [(".".join(map(str, item["loc"])), item["msg"]) for item in error.errors()]
        raise ValueError("; ".join(f"{key}: {text}" for key, text in found)) from None


def module_of(settings: Row) -> str:
    """Module of the case's benchmark; raises ``ValueError`` if it is unknown."""
    name = settings.get("benchmark")
    if name not in BENCHMARKS:
        raise ValueError(f"benchmark: {name!r} is not one of {', '.join(BENCHMARKS)}")
    return f"benchmarks.{name}"


def merge(base: Row, over: Row) -> Row:
    """Merge ``over`` into ``base``, table by table."""
    both = {k: merge(base[k], v) for k, v in over.items() if isinstance(base.get(k), dict)}
    return {**base, **over, **both}


def parse_overrides(arguments: list[str]) -> Row:
    """Parse ``["--turns", "5", "--keys.compile.enable=true"]`` into nested tables."""
    found: Row = {}
    rest = list(arguments)
    while rest:
        key, given, text = rest.pop(0).partition("=")
        if not key.startswith("--"):
            raise ValueError(f"command line: {key!r} is not --key")
        if not given and not rest:
            raise ValueError(f"command line: {key} needs a value")
        text = text if given else rest.pop(0)
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except ValueError:
            value = text
        table, _, name = key.removeprefix("--").partition(".")
        found = merge(found, {table: {name: value} if name else value})
    return found


def add_packages(folder: Path, scratch: Path) -> None:
    """Add ``folder`` and the wheels in it to ``sys.path``."""
    if not folder.is_dir():
        raise SystemExit(f"--packages: there is no folder {folder}")
    for wheel in folder.glob("*.whl"):
        ZipFile(wheel).extractall(scratch)
    # At the end, so that installed packages take precedence. Processes of loops inherit it.
    sys.path += [str(folder.resolve()), str(scratch)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
