"""Draw a run's loss curves: ``python -m tools.plot outputs/debug_model loss.png``"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


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
