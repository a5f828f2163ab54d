"""Draw a run's loss curves: ``python -m tools.plot outputs/debug_model loss.png``"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def draw_modes(records: list[dict[str, Any]], kinds: Sequence[str], picture: Path) -> None:
    """Per mode of the benchmark ``data_parallel``: memory by ``kinds``, bytes sent, tokens/s."""
    names = [record["mode"] for record in records]
    figure, (memory, sent, speed) = pyplot.subplots(
        1, 3, figsize=(11.0, 0.6 + 0.36 * len(names)), width_ratios=(2, 1, 1), sharey=True,
        layout="constrained",
    )  # fmt: skip
    left = [0.0] * len(names)
    for kind, color in zip(kinds, ("#4c72b0", "#dd8452", "#937860", "#c8c8c8"), strict=True):
        widths = [record[kind] / 2**20 for record in records]
        memory.barh(names, widths, left=left, label=kind, color=color)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    traffic = [sum(record["sent"].values()) / 2**20 for record in records]
    rates = [record["tokens_per_second"] for record in records]
    for axes, values, title in (
        (memory, left, "peak memory per rank (MiB)"),
        (sent, traffic, "sent per rank and step (MiB)"),
        (speed, rates, "tokens/s, all ranks"),
    ):
        if axes is not memory:
            axes.barh(names, values, color="#4c72b0")
        for row, value in enumerate(values):
            axes.annotate(
                f"{value:,.0f}", (value, row), (3, 0), textcoords="offset points", va="center",
                fontsize=8,
            )  # fmt: skip
        axes.set_title(title, fontsize=10)
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    memory.invert_yaxis()
    figure.legend(loc="outside lower left", ncols=len(kinds), frameon=False)
    figure.savefig(picture, dpi=150)


def main(run_folder: Path, picture: Path) -> None:
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
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
    main(Path(sys.argv[1]), Path(sys.argv[2]))
