"""The report as one HTML file that needs no other: its data are compressed JSON in the page.

The page's policy (CSP) lets it run its own script alone, and its script writes text only as text.
The compressed data are base64, so that no text of a run is ever parsed as HTML.
"""

import base64
import gzip
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from report.charts import Chart, Series, build_charts
from report.history import Axis
from report.run import Run, default_config

FOLDER = Path(__file__).parent
SCRIPTS = ("elements.js", "scale.js", "chart.js", "page.js", "sections.js", "start.js")
# Begins every report; what begins otherwise is not overwritten.
MARKER = b"<!doctype html>\n<!-- Shardloom report -->\n"


def render(data: dict[str, Any] | None) -> bytes:
    """Return the page with its ``data``; None: the page asks its server for them."""
    script = "\n".join((FOLDER / name).read_text() for name in SCRIPTS)
    style = (FOLDER / "page.css").read_text()
    policy = {
        "default-src": "'none'",
        "script-src": _hash(script),
        "style-src": _hash(style),
        "img-src": "data:",
        "connect-src": "'none'" if data is not None else "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "require-trusted-types-for": "'script'",
    }
    text = "" if data is None else base64.b64encode(compressed(data)).decode()
    page = (FOLDER / "page.html").read_text()
    for name, part in {
        "POLICY": "; ".join(" ".join(item) for item in policy.items()),
        "STYLE": style,
        "DATA": text,
        "SCRIPT": script,
    }.items():
        page = page.replace(f"{{{{{name}}}}}", part, 1)
    return MARKER + page.encode()


def compressed(data: dict[str, Any]) -> bytes:
    """Return ``data`` as gzipped JSON."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return gzip.compress(text.encode(), mtime=0)


def build_data(runs: Sequence[Run], now: float) -> dict[str, Any]:
    """Return all that the page shows of ``runs``, as JSON."""
    charts, notes = build_charts(runs)
    axes: dict[int, int] = {}
    places: list[dict[str, Any]] = []
    for chart in charts:
        for series in chart.series:
            if id(series.axis) not in axes:
                axes[id(series.axis)] = len(places)
                places.append(_axis(series.axis))
    return {
        "time": now,
        "runs": [
            {"name": run.name, "state": run.state, "why": run.why, "facts": run.facts}
            for run in runs
        ],
        "axes": places,
        "charts": [_chart(chart, axes) for chart in charts],
        "marks": [
            asdict(mark) | {"run": i, "time": _since(run, mark.time)}
            for i, run in enumerate(runs)
            for mark in run.marks
        ],
        "samples": [[asdict(sample) for sample in run.samples] for run in runs],
        "config": _config(runs),
        "provenance": [run.provenance for run in runs],
        "notes": notes,
        "problems": [text for run in runs for text in run.problems],
    }


def _since(run: Run, time: float | None) -> float | None:
    """Seconds since the first line of ``run``; None if ``time`` is, or no line has a time."""
    return None if time is None or run.begin is None else round(time - run.begin, 2)


def _config(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return one row per key: its default, and its value in each run."""
    defaults = default_config()
    # Keys that no run has were added by a later version of Shardloom.
    keys = dict.fromkeys([*defaults, *(key for run in runs for key in run.config)])
    rows = []
    for key in keys:
        values = [run.config.get(key) for run in runs]
        # None is absent from TOML.
        if any(value is not None for value in values):
            rows.append({"key": key, "default": defaults.get(key), "values": values})
    return rows


def _axis(axis: Axis) -> dict[str, Any]:
    """Differences of consecutive places, which compress well; times in hundredths of a second."""
    return {
        "step": _differences(axis.steps),
        "tokens": axis.tokens and _differences(map(round, axis.tokens)),
        "time": axis.seconds and _differences(round(100 * value) for value in axis.seconds),
    }


def _differences(values: Iterable[int]) -> list[int]:
    differences, before = [], 0
    for value in values:
        differences.append(value - before)
        before = value
    return differences


def _chart(chart: Chart, axes: dict[int, int]) -> dict[str, Any]:
    series = [_series(curve, axes[id(curve.axis)]) for curve in chart.series]
    head = {"id": chart.id, "title": chart.title, "unit": chart.unit}
    return head | {"zero": chart.from_zero, "ordered": chart.is_ordered, "series": series}


def _series(series: Series, axis: int) -> dict[str, Any]:
    points = series.points
    row: dict[str, Any] = {
        "run": series.run,
        "label": series.label,
        "style": series.style,
        "axis": axis,
        "mean": _rounded(points.mean),
    }
    if points.low != points.high:
        row |= {"low": _rounded(points.low), "high": _rounded(points.high)}
    return row


def _rounded(values: Iterable[float | None]) -> list[float | None]:
    """Six digits are more than a chart shows."""
    return [None if value is None else float(f"{value:.6g}") for value in values]


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
