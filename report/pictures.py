"""The charts of a report as PNG files, for papers and slides."""

import re
from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

from runtime.commands import install_text

try:
    import matplotlib
    from matplotlib import pyplot
    from matplotlib.colors import to_rgb
except ModuleNotFoundError as error:
    if error.name != "matplotlib":
        raise
    raise ValueError(f"--png needs matplotlib: {install_text('matplotlib>=3.9')}") from None

from report.charts import Chart, Series, is_shown
from report.run import Run

matplotlib.use("Agg")
SOFTWARE = "Shardloom report"
# Names of files have at most 255 bytes; a character may take four.
MAX_STEM = 60
# In the first bytes of each file.
MARK = b"tEXtSoftware\0" + SOFTWARE.encode()
# As on the page (page.css).
COLORS = ("#0072b2", "#d55e00", "#00835f", "#a8508a", "#8a6d00", "#3d8fca", "#55554f", "#b5322a")
# Of curves beyond these colors.
DASHES = ((0, (6, 2)), (0, (1, 2)))
STYLES: dict[str, dict[str, Any]] = {
    "line": {"linewidth": 1.2},
    "points": {"linewidth": 1.2, "marker": "o", "markersize": 3.5},
    "plan": {"linewidth": 1.0, "linestyle": "--"},
    "limit": {"linewidth": 1.0, "linestyle": "--"},
    "undone": {"linewidth": 1.0, "linestyle": ":"},
}


def file_names(charts: Sequence[Chart]) -> dict[str, Chart]:
    """Charts by the names of their files. Names of other metrics are anyone's."""
    named: dict[str, Chart] = {}
    taken: set[str] = set()
    for chart in charts:
        stem = re.sub(r"\W+", "_", chart.id.removeprefix("other:"))[:MAX_STEM]
        stems = chain([stem], (f"{stem}_{number}" for number in count(2)))
        # Some file systems do not tell capital letters apart.
        free = next(each for each in stems if each.casefold() not in taken)
        taken.add(free.casefold())
        named[f"{free}.png"] = chart
    return named


def draw(chart: Chart, runs: Sequence[Run], path: Path) -> None:
    """Write ``chart`` to ``path``, over steps."""
    names = [run.name for run in runs]
    figure, axes = pyplot.subplots(figsize=(7.0, 3.6), layout="constrained")
    for series in chart.series:
        if series.style != "text":
            _plot(axes, series, _look(chart, series, is_alone=len(runs) == 1))
    _label(axes, chart, names)
    figure.savefig(path, dpi=150, metadata={"Software": SOFTWARE})
    pyplot.close(figure)


def _look(chart: Chart, series: Series, *, is_alone: bool) -> dict[str, Any]:
    """Color and dashes of a curve, as on the page (page.js)."""
    measured = [s for s in chart.series if is_shown(s) and (is_alone or s.style == series.style)]
    labels = list(dict.fromkeys(s.label for s in measured))
    number = labels.index(series.label) if series.label in labels else 6
    depth = number / max(len(labels) - 1, 1)
    if is_alone and chart.is_ordered:
        return {"color": matplotlib.colormaps["viridis"](0.9 * (1 - depth))}
    if is_alone:
        again, number = divmod(number, len(COLORS))
        return {"color": COLORS[number]} | ({"linestyle": DASHES[again - 1]} if again else {})
    # From pale to strong.
    white = 0.5 * (1 - depth) if len(labels) > 1 else 0.0
    color = to_rgb(COLORS[series.run % len(COLORS)])
    return {"color": [(1 - white) * part + white for part in color]}


def _plot(axes: Any, series: Series, look: dict[str, Any]) -> None:
    points, steps = series.points, series.axis.steps
    values = [float("nan") if value is None else value for value in points.mean]
    label = f"{series.run}\n{series.label}"
    around = [None, *points.mean, None]
    alone = [i for i in range(len(values)) if around[i] is None and around[i + 2] is None]
    # A line of one point has no length.
    dots = {"marker": ".", "markevery": alone} if alone else {}
    axes.plot(steps, values, label=label, **dots | STYLES[series.style] | look)
    if points.low != points.high:
        bounds = [
            [float("nan") if value is None else value for value in bound]
            for bound in (points.low, points.high)
        ]
        axes.fill_between(steps, *bounds, color=look["color"], alpha=0.25, linewidth=0.5)


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
