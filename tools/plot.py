"""Plot a run's loss curves: ``shardloom plot RUN_FOLDER PICTURE.png``"""

import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from metrics.metrics_file import read_metrics
from runtime import exit_codes
from runtime.log import say
from tools.cli import Parser, path_argument, reporting_errors


@reporting_errors
def main(arguments: list[str]) -> int:
    parser = Parser("shardloom plot", description=__doc__)
    parser.add_argument("run_folder", type=path_argument)
    parser.add_argument("picture", type=path_argument)
    options = parser.parse_args(arguments)
    plot_losses(options.run_folder, options.picture)
    return exit_codes.DONE


def plot_losses(run_folder: Path, picture: Path) -> None:
    """Write ``picture`` from metrics.jsonl; say on stderr which lines cannot be read.

    Raises ``ValueError`` if there is none to plot.
    """
    path = run_folder / "metrics.jsonl"
    records, problems = read_metrics(path)
    say(*(f"problem: {text}" for text in problems), file=sys.stderr)
    if not records:
        raise ValueError(f"{path}: no line of metrics")
    figure, axes = pyplot.subplots(figsize=(7.0, 3.6), layout="constrained")
    curves: list[tuple[str, str, dict[str, Any]]] = [
        ("loss", "training", {"linewidth": 1.0, "color": "0.6"}),
        ("validation_loss", "validation", {"marker": "o", "markersize": 4, "color": "C0"}),
    ]
    for key, label, style in curves:
        values = [(record["step"], record.get(key)) for record in records]
        points = [point for point in values if point[1] is not None]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=run_folder.name)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(picture, dpi=150)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
