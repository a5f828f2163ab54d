"""Plot of docs/data_parallel.md: memory, communication and throughput of each mode."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

COLORS = {
    "parameters": "#4c72b0",
    "gradients": "#dd8452",
    "optimizer": "#937860",
    "rest": "#c8c8c8",
}


def plot_modes(rows: list[dict[str, Any]], picture: Path) -> None:
    """Plot memory by kind, bytes sent and tokens/s of each ``data_parallel`` row to ``picture``."""
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
    sent_mib = [row["sent_mib"] for row in rows]
    rates = [row["tokens_per_second"] for row in rows]
    for axes, values, title in (
        (memory, left, "peak memory per rank (MiB)"),
        (sent, sent_mib, "sent per rank and step (MiB)"),
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
