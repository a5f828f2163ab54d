"""Draw a run's loss curves: ``python -m tools.plot RUN_FOLDER PICTURE.png``"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from runtime import exit_codes
from tools.arguments import Parser, telling_mistakes

COLORS = {
    "parameters": "#4c72b0",
    "gradients": "#dd8452",
    "optimizer": "#937860",
    "rest": "#c8c8c8",
}


def draw_modes(rows: list[dict[str, Any]], picture: Path) -> None:
    """Per row of the benchmark ``data_parallel``: memory by kind, bytes sent, tokens/s."""
    names = [row["what"] for row in rows]
    figure, (memory, sent, speed) = pyplot.subplots(
        1, 3, figsize=(11.0, 0.6 + 0.36 * len(names)), width_ratios=(2, 1, 1), sharey=True,
        layout="constrained",
    )  # fmt: skip
    left = [0.0] * len(names)
    for kind, color in COLORS.items():
        widths = [row[f"{kind}_mib"] for row in rows]
        memory.barh(names, widths, left=left, label=kind, color=color)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    traffic = [row["sent_mib"] for row in rows]
    rates = [row["tokens_per_second"] for row in rows]
    for axes, values, title in (
        (memory, left, "peak memory per rank (MiB)"),
        (sent, traffic, "sent per rank and step (MiB)"),
        (speed, rates, "tokens/s, all ranks"),
    ):
        if axes is not memory:
            axes.barh(names, values, color="#4c72b0")
        for place, value in enumerate(values):
            axes.annotate(
                f"{value:,.0f}", (value, place), (3, 0), textcoords="offset points", va="center",
                fontsize=8,
            )  # fmt: skip
        axes.set_title(title, fontsize=10)
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    memory.invert_yaxis()
    figure.legend(loc="outside lower left", ncols=len(COLORS), frameon=False)
    figure.savefig(picture, dpi=150)


@telling_mistakes
def main(arguments: list[str]) -> int:
    parser = Parser("python -m tools.plot", description=__doc__)
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args(arguments)
    draw_losses(options.run_folder, options.picture)
    return exit_codes.DONE


def draw_losses(run_folder: Path, picture: Path) -> None:
    path = run_folder / "metrics.jsonl"
    try:
        records = [json.loads(line) for line in path.read_text().splitlines()]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    figure, axes = pyplot.subplots(figsize=(7.0, 3.6), layout="constrained")
    curves: list[tuple[str, str, dict[str, Any]]] = [
        ("loss", "training", {"linewidth": 1.0, "color": "0.6"}),
        ("validation_loss", "held-out files", {"marker": "o", "markersize": 4, "color": "C0"}),
    ]
    for key, label, style in curves:
        points = [(record["step"], record[key]) for record in records if key in record]
        axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=run_folder.name)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(picture, dpi=150)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
