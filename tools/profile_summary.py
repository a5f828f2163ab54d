"""Summarize profiler traces: ``shardloom profile RUN_OR_TRACE...``

RUN is the folder of a run, whose newest traced step is read, on all ranks; or give trace files. A
trace is written with --profiling.enable_trace true, or when control/trace is created in the folder
of a run that trains.

compute: operators or kernels run. exposed: communication while nothing is computed; communication
includes what compute hides. data: waiting for a batch. host: the rest; an idle GPU, or Python
between operators. The four parts of a step sum to 100 %.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import tomli

from metrics.trace_advice import advice, late_rank
from metrics.trace_file import read_trace
from metrics.trace_summary import RankSummary, Skew, compare_ranks, summarize
from runtime import exit_codes
from runtime.filesystem import read_file
from runtime.log import say
from runtime.provenance import FOLDER, config_at
from tools.cli import Parser, path_argument, reporting_errors

N_TOP, MAX_RANKS, MAX_NAME = 12, 16, 60
TRACE = re.compile(r"trace-step-(\d{8,15})-rank(\d{1,9})\.json(\.gz)?")


@reporting_errors
def main(arguments: list[str]) -> int:
    parser = Parser("shardloom profile", description=__doc__)
    parser.add_argument("paths", metavar="RUN_OR_TRACE", nargs="+", type=path_argument)
    options = parser.parse_args(arguments)
    ranks = []
    for given in options.paths:
        found = [summarize(read_trace(path), n_top=N_TOP) for path in trace_files(given)]
        ranks += of_newest_start(found) if given.is_dir() else found
    ranks.sort(key=lambda each: each.rank)
    check_one_step(ranks)
    say(*report(ranks, read_config(ranks[0].path)))
    return exit_codes.DONE


def trace_files(path: Path) -> list[Path]:
    """Traces of the step traced last in a run's folder, in rank order; or the file itself."""
    if not path.is_dir():
        return [path]
    folder = path / "traces" if (path / "traces").is_dir() else path
    named = {file: match for file in folder.iterdir() if (match := TRACE.fullmatch(file.name))}
    if not named:
        text = "has no traces; write some with --profiling.enable_trace true, or create"
        raise ValueError(f"{path} {text} {path / 'control' / 'trace'} while the run trains")
    # After a rollback, steps come again.
    newest = named[max(named, key=lambda file: file.stat().st_mtime)]
    files = [file for file, match in named.items() if int(match[1]) == int(newest[1])]
    return sorted(files, key=lambda file: int(named[file][2]))


def of_newest_start(ranks: Sequence[RankSummary]) -> list[RankSummary]:
    """Skip what a start with other ranks wrote of a step that a later one traced again."""
    newest = max(ranks, key=lambda each: each.path.stat().st_mtime)
    kept = [each for each in ranks if each.world_size == newest.world_size]
    if len(kept) < len(ranks):
        say(f"{len(ranks) - len(kept)} traces of another start are skipped")
    return kept


def check_one_step(ranks: Sequence[RankSummary]) -> None:
    """Raise ``ValueError`` unless the traces are of different ranks in the same steps of a run."""
    first = ranks[0]
    for before, each in pairwise(ranks):
        if each.rank == before.rank:
            raise ValueError(f"{before.path} and {each.path}: both of rank {each.rank}")
        if each.steps != first.steps:
            raise ValueError(f"{first.path} and {each.path}: not of the same steps")
        if each.world_size != first.world_size:
            raise ValueError(f"{first.path} and {each.path}: not of the same number of ranks")


def read_config(trace: Path) -> dict[str, Any]:
    """Tables of the configuration that ``trace`` was written with; {} if the trace is elsewhere.

    config.toml, which is that of the run's last start, if the starts before are not recorded.
    """
    run = trace.absolute().parent.parent
    try:
        return config_at(run / FOLDER, trace.stat().st_mtime) or tomli.loads(
            read_file(run / "config.toml").decode()
        )
    except (OSError, ValueError):
        return {}


def report(ranks: Sequence[RankSummary], config: Mapping[str, Any]) -> Iterator[str]:
    """Lines of the summary."""
    first, skew = ranks[0], compare_ranks(ranks)
    steps = f"step {first.steps[-1]}"
    if len(first.steps) > 1:
        steps = f"steps {first.steps[0]} to {first.steps[-1]}"
    device = "GPU" if first.is_gpu else "CPU"
    count = f"{len(ranks)} of {first.world_size} ranks"
    yield f"{steps}, {count}, {device}, {first.backend or 'one process'}: {first.path.parent}"
    yield ""
    yield from step_table(ranks, skew)
    between = [f"{name} {time / 1e6:.3f} s" for name, time in first.between.items()]
    if between:
        yield f"between the steps, not counted: {', '.join(between)}"
    yield ""
    shown = next(each for each in ranks if each.rank == busiest(ranks, skew))
    yield from operator_table(shown)
    if shown.by_collective:
        yield ""
        yield from collective_table(shown)
    if skew.problem:
        yield ""
        yield f"who waits for whom: not known, because {skew.problem}"
    lines = advice(ranks, skew, config)
    yield ""
    yield from (lines or ["nothing stands out"])


def busiest(ranks: Sequence[RankSummary], skew: Skew) -> int:
    """The rank that the others wait for, else the one with the most compute."""
    late = late_rank(ranks, skew)
    return max(ranks, key=lambda each: each.compute).rank if late is None else late


def step_table(ranks: Sequence[RankSummary], skew: Skew) -> Iterator[str]:
    """One line per rank: seconds of a step, and the share of each part."""
    rows: list[tuple[str, ...]] = [
        ("rank", "step s", "compute", "exposed", "data", "host", "communication", "waits")
    ]
    by_compute = sorted(ranks, key=lambda each: each.compute)
    extremes = [*by_compute[: MAX_RANKS // 2], *by_compute[-(MAX_RANKS // 2) :]]
    shown = list(ranks) if len(ranks) <= MAX_RANKS else sorted(extremes, key=lambda r: r.rank)
    for each in shown:
        parts = (each.compute, each.exposed, each.data_wait, each.host, each.communication)
        shares = (f"{100 * part / each.time:.1f} %" for part in parts)
        waits = f"{100 * skew.waits[each.rank] / each.time:.1f} %" if skew.n_compared else "-"
        rows.append((str(each.rank), f"{each.time / len(each.steps) / 1e6:.4g}", *shares, waits))
    yield from table(rows)
    if len(ranks) > len(shown):
        yield f"and {len(ranks) - len(shown)} ranks between these in compute"
    if skew.n_compared:
        yield "waits: within collectives, for the rank that joined last"


def operator_table(rank: RankSummary) -> Iterator[str]:
    """Operators or kernels of one rank, by their own time."""
    kind = "kernel" if rank.is_gpu else "operator"
    rows = [(f"{kind}, rank {rank.rank}", "per step", "ms of a step", "share")]
    n_steps = len(rank.steps)
    for each in rank.top:
        share = f"{100 * each.microseconds / rank.time:.1f} %"
        ms = f"{each.microseconds / n_steps / 1e3:.3f}"
        rows.append((short(each.name), f"{each.count / n_steps:g}", ms, share))
    return table(rows)


def collective_table(rank: RankSummary) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [("collective", "per step", "ms of a step", "exposed ms")]
    n_steps = len(rank.steps)
    for each in rank.by_collective[:N_TOP]:
        name = f"{each.name} ({each.description})" if each.description else each.name
        times = (f"{time / n_steps / 1e3:.3f}" for time in (each.microseconds, each.exposed))
        rows.append((short(name), f"{each.count / n_steps:g}", *times))
    return table(rows)


def short(name: str) -> str:
    return name if len(name) <= MAX_NAME else name[: MAX_NAME - 3] + "..."


def table(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Align columns: the first to the left, numbers to the right."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        yield "  ".join([first.ljust(widths[0]), *cells]).rstrip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
