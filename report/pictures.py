"""The charts of a report as PNG files, for papers and slides."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

try:
    import matplotlib
    from matplotlib import pyplot
except ModuleNotFoundError as error:
    if error.name != "matplotlib":
        raise
    raise ValueError("--png needs matplotlib: pip install 'matplotlib>=3.9'") from None

from report.charts import Chart, Series, is_shown
from report.run import Run

matplotlib.use("Agg")
# As on the page (page.css).
COLORS = ("#0072b2", "#d55e00", "#00835f", "#a8508a", "#8a6d00", "#3d8fca", "#55554f", "#b5322a")
STYLES: dict[str, dict[str, Any]] = {
    "line": {"linewidth": 1.2},
    "points": {"linewidth": 1.2, "marker": "o", "markersize": 3.5},
    "plan": {"linewidth": 1.0, "linestyle": "--"},
    "limit": {"linewidth": 1.0, "linestyle": "--"},
    "undone": {"linewidth": 1.0, "linestyle": ":"},
}


def draw(charts: Sequence[Chart], runs: Sequence[Run], folder: Path) -> Iterator[Path]:
    """Write each chart to ``folder``, over steps; yield the files."""
    names = [run.name for run in runs]
    for chart in charts:
        # Names of other metrics are anyone's.
        path = folder / (re.sub(r"\W+", "_", chart.id.removeprefix("other:"), flags=re.A) + ".png")
        figure, axes = pyplot.subplots(figsize=(7.0, 3.6), layout="constrained")
        measured = list(dict.fromkeys(s.label for s in chart.series if is_shown(s)))
        for series in chart.series:
            if series.style == "text":
                continue
            number = measured.index(series.label) if series.label in measured else 6
            _plot(axes, series, COLORS[(number if len(runs) == 1 else series.run) % len(COLORS)])
        _label(axes, chart, names)
        figure.savefig(path, dpi=150)
        pyplot.close(figure)
        yield path


def _plot(axes: Any, series: Series, color: str) -> None:
    points, steps = series.points, series.axis.steps
    values = [float("nan") if value is None else value for value in points.mean]
    label = f"{series.run}\n{series.label}"
    axes.plot(steps, values, label=label, color=color, **STYLES[series.style])
    if points.low != points.high:
        bounds = [
            [float("nan") if value is None else value for value in bound]
            for bound in (points.low, points.high)
        ]
        axes.fill_between(steps, *bounds, color=color, alpha=0.25, linewidth=0.5)


def _label(axes: Any, chart: Chart, names: Sequence[str]) -> None:
    axes.set(xlabel="step", ylabel=chart.unit)
    # Text between two dollars would be typeset as a formula.
    axes.set_title(_plain(chart.title if len(names) > 1 else f"{names[0]}: {chart.title}"))
    axes.spines[["top", "right"]].set_visible(False)
    if chart.from_zero:
        axes.set_ylim(bottom=0.0)
    handles: dict[str, Any] = {}
    for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
        run, _, name = label.partition("\n")
        handles.setdefault(
            _plain(name if len(names) == 1 else f"{names[int(run)]}: {name}"), handle
        )
    if len(handles) > 1:
        axes.legend(handles.values(), handles.keys(), frameon=False, fontsize=8)


def _plain(text: str) -> str:
    return text.replace("$", r"\$")
