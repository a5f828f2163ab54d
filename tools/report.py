"""Show runs as one HTML page: ``./shardloom report RUN_FOLDER... [-o report.html]``

The page needs no network: curves of loss, gradient norm, learning rate, throughput and more, marks
of checkpoints and failures, samples, and the configuration; of several runs, side by side.

  ./shardloom report outputs/debug_model                    writes report.html
  ./shardloom report outputs/a outputs/b -o a_and_b.html    compares two runs
  ./shardloom report outputs/debug_model --png pictures     also draws the charts as PNG files
  ./shardloom report outputs/debug_model --watch            serves the page while the run goes on
"""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from report.charts import Chart, build_charts
from report.page import MARKER, build_data, render
from report.run import Run, read_run
from report.watch import serve
from runtime import exit_codes
from runtime.filesystem import replaced_file
from runtime.log import say
from tools.cli import Parser, check_output, path_argument, reporting_errors, whole_number
from tools.status import is_run_folder, state_of

MAX_RUNS = 8
DEFAULT_OUTPUT, DEFAULT_PORT = "report.html", 6060


@reporting_errors
def main(arguments: list[str]) -> int:
    parser = Parser("shardloom report", description=__doc__)
    parser.add_argument("folders", nargs="+", type=path_argument, metavar="RUN_FOLDER")
    parser.add_argument(
        "-o",
        "--output",
        type=path_argument,
        metavar="FILE",
        help=f"default: {DEFAULT_OUTPUT}; another file of this name is not overwritten",
    )
    parser.add_argument(
        "--png",
        type=path_argument,
        metavar="FOLDER",
        help="draw PNG files too; other files of their names are not overwritten",
    )
    parser.add_argument(
        "--watch", action="store_true", help="serve the page on this machine until Ctrl-C"
    )
    parser.add_argument(
        "--port", type=whole_number(0, 65535), help=f"of --watch; default: {DEFAULT_PORT}, 0: any"
    )
    options = parser.parse_args(arguments)
    folders: list[Path] = options.folders
    if len(folders) > MAX_RUNS:
        raise ValueError(f"{len(folders)} runs: at most {MAX_RUNS} are shown in one report")
    if options.watch and (options.output or options.png):
        raise ValueError("--watch writes no file: call it without -o and --png")
    if options.port is not None and not options.watch:
        raise ValueError("--port has no effect without --watch")
    if options.watch:
        port = DEFAULT_PORT if options.port is None else options.port
        serve(lambda: page_data(folders), folders, port)
        return exit_codes.DONE
    write_report(folders, options.output or Path(DEFAULT_OUTPUT), options.png)
    return exit_codes.DONE


def write_report(folders: Sequence[Path], output: Path, pictures: Path | None) -> None:
    """Write the page of the runs in ``folders``, and PNG files to the folder ``pictures``.

    Raises ``OSError`` or ``ValueError`` if a folder has no run, or a file would be overwritten that
    this command has not written.
    """
    check_output(output, MARKER)
    runs = read_runs(folders)
    charts: dict[Path, Chart] = {}
    if pictures is not None:
        from report.pictures import MARK, draw, file_names  # Imports an optional package.

        pictures.mkdir(parents=True, exist_ok=True)
        named = file_names(build_charts(runs)[0])
        charts = {pictures / name: chart for name, chart in named.items()}
        for path in charts:
            check_output(path, MARK)
    with replaced_file(output) as scratch:
        scratch.write_bytes(render(build_data(runs, time.time())))
    for run in runs:
        say(*(f"problem: {text}" for text in run.problems), file=sys.stderr)
    say(f"report: {output}, {output.stat().st_size / 1e6:.1f} MB")
    for path, chart in charts.items():
        with replaced_file(path) as scratch:
            draw(chart, runs, scratch)
        say(f"picture: {path}")


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read all runs, named by as much of their paths as tells them apart."""
    parts = [folder.resolve().parts for folder in folders]
    if len(set(parts)) < len(parts):
        raise ValueError("a run is given twice")
    # A path has fewer parts than this, or an earlier number would do.
    length = next(n for n in range(1, 1000) if len({path[-n:] for path in parts}) == len(parts))
    now = time.time()
    return [
        read_run(folder, "/".join(path[-length:]), now, _state)
        for folder, path in zip(folders, parts, strict=True)
    ]


def _state(
    control: Path, now: float, lines: Sequence[Mapping[str, Any]], failure: Mapping[str, Any]
) -> tuple[str, str, float]:
    """State as ``state_of`` returns it. Copies of a run may lack its control files."""
    if is_run_folder(control.parent):
        return state_of(control, now, lines, failure)
    return "unknown", "no control/lock", lines[-1]["time"] if lines else now


def page_data(folders: Sequence[Path]) -> dict[str, Any]:
    """Read the runs in ``folders`` as the page shows them."""
    return build_data(read_runs(folders), time.time())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
