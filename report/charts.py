"""The charts of a report: which metrics are shown together, under which title and unit."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from metrics.history import Line
from report.history import (
    MAX_POINTS,
    MAX_UNDONE,
    Axis,
    Points,
    axis_of,
    edges_of,
    interpolate,
    keys_of,
    points_at_largest,
    points_of,
    since,
    times_of,
    tokens_at,
)
from report.run import Run
from runtime.printable import printable

MAX_SERIES = 24
# Of all curves of layers and sources together, which may be hundreds.
MAX_POINTS_OF_PARTS = 100_000
Style = Literal["line", "points", "plan", "limit", "undone", "text"]


@dataclass(frozen=True)
class Series:
    """A curve. ``style``: plotted as a line; as points joined by a line; dashed, because planned, a
    limit, or undone; or not plotted, but named beside the cursor."""

    run: int
    label: str
    style: Style
    axis: Axis
    points: Points


@dataclass(frozen=True)
class Chart:
    """One chart. Its series may be of several runs."""

    id: str
    title: str
    unit: str
    series: list[Series]
    from_zero: bool = False
    """The vertical axis begins at 0."""
    is_ordered: bool = False
    """Labels have an order, which colors show: layers, from the first to the last."""


@dataclass(frozen=True)
class Kind:
    """A chart by the metrics that it has."""

    id: str
    title: str
    unit: str
    curves: dict[str, str]
    """Label by key of metrics.jsonl. A key that ends with "/" stands for all that begin with it."""
    scale: float = 1.0
    absent: str = ""
    """Why no run may have such a chart; "" if it goes without saying."""


KINDS = [
    Kind("loss", "Loss", "nats per token", {"loss": "training", "validation_loss": "validation"}),
    Kind("sources", "Validation loss by source", "nats per token", {"validation_loss/": ""}),
    Kind(
        "bits", "Validation, bits per byte", "bits",
        {"validation_bits_per_byte": "validation", "validation_bits_per_byte/": ""},
    ),
    Kind("grad_norm", "Gradient norm", "before clipping", {"grad_norm": "gradient norm"}),
    Kind("lr", "Learning rate", "", {"lr": "done"}),
    Kind("batch", "Batch size", "tokens per step", {}),
    Kind("rate", "Throughput", "tokens per second", {"tokens_per_second": "tokens/s"}),
    Kind(
        "mfu", "MFU", "% of peak FLOP/s", {"mfu": "MFU", "mfu_causal": "MFU, causal"}, 100.0,
        absent="MFU: no peak is known for the device; set metrics.peak_tflops",
    ),
    Kind("time", "Time per step", "seconds", {"seconds_per_step": "seconds"}),
    Kind("wait", "Waiting for data", "% of time", {"data_wait": "data wait"}, 100.0),
    Kind("memory", "Peak memory", "GiB", {"memory_gib": "memory"}),
    Kind("experts", "Expert load", "largest over mean", {"expert_load": "largest load"}),
    Kind(
        "slow", "Slowest rank", "time over median",
        {"slowest_over_median": "slowest rank", "slowest_rank": "its number"},
        absent="Slowest rank: set metrics.straggler_window",
    ),
    Kind(
        "layer_weight", "Weights of layers", "norm", {"layer_weight_norm/": ""},
        absent="Layers: set metrics.layer_stats_freq",
    ),
    Kind("layer_grad", "Gradients of layers", "norm before clipping", {"layer_grad_norm/": ""}),
    Kind(
        "layer_update", "Updates of layers", "norm over that of the weights",
        {"layer_update_ratio/": ""},
    ),
    Kind("layer_rms", "Outputs of layers", "RMS", {"layer_activation_rms/": ""}),
    Kind(
        "layer_logit", "Attention logits of layers", "largest", {"layer_attention_logit/": ""}
    ),
    Kind(
        "layer_dead", "Dead experts of layers", "% without a token", {"layer_dead_experts/": ""},
        100.0,
    ),
    Kind("shares", "Tokens by source", "% of all", {"data_share/": ""}, 100.0),
    Kind("epochs", "Epochs by source", "epochs", {"data_epochs/": ""}),
    Kind(
        "skipped", "Skipped", "in all",
        {"skipped_steps": "updates", "bad_records": "bad records"},
    ),
]  # fmt: skip
FROM_ZERO = {"grad_norm", "lr", "batch", "rate", "mfu", "time", "wait", "shares", "skipped"}
FROM_ZERO |= {"layer_update", "layer_dead"}
# Not plotted while it is 0 on every line.
COUNTS = {"skipped_steps", "bad_records"}


def build_charts(runs: Sequence[Run]) -> tuple[list[Chart], list[str]]:
    """Charts of all runs that have a value, and what is missing from them."""
    curves = [curve for i, run in enumerate(runs) for curve in _curves(i, run)]
    charts, notes = [], []
    for kind in KINDS:
        series = [_labeled(kind, key, curve) for key, curve in curves if _label(kind, key)]
        for i, run in enumerate(runs):
            series += _planned(kind.id, i, run)
        if kind.id == "grad_norm" and len(runs) == 1:
            series += _limit(runs[0])
        if any(is_shown(curve) for curve in series):
            shown = _shown_labels(kind, [curve.label for curve in series])
            n_labels = len({curve.label for curve in series})
            notes += [f"{kind.title}: {MAX_SERIES} of {n_labels} curves are shown"] * (
                len(shown) < n_labels
            )
            series = [curve for curve in series if curve.label in shown]
            head = kind.id, kind.title, kind.unit
            charts.append(Chart(*head, series, kind.id in FROM_ZERO, is_ordered(kind)))
        elif kind.absent:
            notes.append(kind.absent)
    rest = [(key, curve) for key, curve in curves if not any(_label(kind, key) for kind in KINDS)]
    others = list(dict.fromkeys(key for key, _ in rest))
    if len(others) > MAX_SERIES:
        notes.append(f"{len(others) - MAX_SERIES:,} other metrics are not shown")
    for key in others[:MAX_SERIES]:
        series = [curve for other, curve in rest if other == key]
        charts.append(Chart(f"other:{printable(key)}", printable(key), "", series))
    return charts, notes


def _shown_labels(kind: Kind, labels: Sequence[str]) -> set[str]:
    """Labels of the curves that fit into a chart: of layers, evenly many from all of the model."""
    distinct = list(dict.fromkeys(labels))
    if len(distinct) <= MAX_SERIES or not is_ordered(kind):
        return set(distinct[:MAX_SERIES])
    last = len(distinct) - 1
    return {distinct[last * i // (MAX_SERIES - 1)] for i in range(MAX_SERIES)}


def is_ordered(kind: Kind) -> bool:
    """True if the labels of a chart are layers."""
    return kind.id.startswith("layer_")


def is_shown(series: Series) -> bool:
    """True if the series is a curve with a value that was measured."""
    is_measured = series.style in ("line", "points", "plan")
    return is_measured and any(value is not None for value in series.points.mean)


def _label(kind: Kind, key: str) -> str:
    """Label of a metric in a chart; "" if it is not in it."""
    for name, label in kind.curves.items():
        if name.endswith("/") and key.startswith(name):
            return key.removeprefix(name) or key
        if key == name:
            return label
    return ""


def _labeled(kind: Kind, key: str, series: Series) -> Series:
    style = "text" if key == "slowest_rank" else series.style
    label = printable(_label(kind, key))
    if style == "undone":
        label += ", undone"
    return Series(series.run, label, style, series.axis, _scaled(series.points, kind.scale))


def _scaled(points: Points, scale: float) -> Points:
    if scale == 1.0:
        return points
    columns = (points.mean, points.low, points.high)
    return Points(*([None if v is None else v * scale for v in column] for column in columns))


def _curves(number: int, run: Run) -> Iterator[tuple[str, Series]]:
    """Yield each metric of a run with its curve, and with what was undone of it."""
    history = run.history
    yield from _curves_of(number, run, history.training, "line")
    # Apart, because a line without the value is a gap in its curve.
    for is_validation in (True, False):
        lines = [line for line in history.other if ("validation_loss" in line) == is_validation]
        yield from _curves_of(number, run, lines, "points")
    for lines in history.undone[-MAX_UNDONE:]:
        for key, series in _curves_of(number, run, lines, "undone"):
            if key in ("loss", "grad_norm"):
                yield key, series


def _curves_of(
    number: int, run: Run, lines: Sequence[Line], style: Style
) -> Iterator[tuple[str, Series]]:
    if not lines:
        return
    keys = keys_of(lines)
    of_parts = [key for key in keys if "/" in key]
    for group, most in (
        ([key for key in keys if "/" not in key], MAX_POINTS),
        (of_parts, min(MAX_POINTS, MAX_POINTS_OF_PARTS // max(len(of_parts), 1))),
    ):
        edges = edges_of(len(lines), most)
        axis = since(axis_of(lines, edges, run.history.training), run.begin)
        for key in group:
            values = [line.get(key) for line in lines]
            if any(values if key in COUNTS else (value is not None for value in values)):
                yield key, Series(number, key, style, axis, _points(key, lines, edges))


def _points(key: str, lines: Sequence[Line], edges: Sequence[int]) -> Points:
    values = [line.get(key) for line in lines]
    if key != "slowest_rank":
        return points_of(values, edges)
    # Not the mean, which may be a rank that was never slow.
    return points_at_largest(values, [line.get("slowest_over_median") for line in lines], edges)


def _planned(chart: str, number: int, run: Run) -> Iterator[Series]:
    """Yield what the configuration says of a chart's values."""
    plan = run.plan
    is_ramp = plan is not None and len(set(plan.batch_tokens)) > 1
    if plan is None or not ((chart == "lr" and plan.lr) or (chart == "batch" and is_ramp)):
        return
    axis = _axis_at(run, plan.steps, [float(tokens) for tokens in plan.tokens])
    values = plan.lr if chart == "lr" else [float(tokens) for tokens in plan.batch_tokens]
    yield _exact(number, "planned", "plan", axis, values)
    if chart == "batch":
        yield from _batch_done(number, run)


def _limit(run: Run) -> Iterator[Series]:
    """Yield the norm to which gradients are clipped."""
    training = run.history.training
    if run.max_norm is not None and training:
        axis = _axis_at(run, [training[0]["step"], training[-1]["step"]])
        yield _exact(0, f"clipped above {run.max_norm:g}", "limit", axis, [run.max_norm] * 2)


def _batch_done(number: int, run: Run) -> Iterator[Series]:
    """Yield the tokens per step since the line before."""
    lines = [line for line in run.history.training if line.get("tokens") is not None]
    sizes = [
        max(new["tokens"] - old["tokens"], 0) / (new["step"] - old["step"])
        for old, new in pairwise(lines)
    ]
    if sizes:
        edges = edges_of(len(sizes))
        axis = since(axis_of(lines[1:], edges, lines), run.begin)
        yield Series(number, "done", "line", axis, points_of(sizes, edges))


def _axis_at(run: Run, steps: list[int], planned: list[float] | None = None) -> Axis:
    """Places of ascending ``steps``. After the last line, tokens are ``planned``, times unknown."""
    training = run.history.training
    lines = [line["step"] for line in training]
    done = bisect_right(steps, lines[-1]) if lines else 0
    times = times_of(training)
    seconds = times and list(interpolate(steps[:done], list(zip(lines, times, strict=True))))
    tokens = tokens_at(steps[:done], training)
    if planned is not None:
        offset = tokens[-1] - planned[done - 1] if tokens else 0.0
        tokens = (tokens or planned[:done]) + [offset + value for value in planned[done:]]
    return since(Axis(steps, tokens, seconds), run.begin)


def _exact(number: int, label: str, style: Style, axis: Axis, values: list[float]) -> Series:
    exact: list[float | None] = list(values)
    return Series(number, label, style, axis, Points(exact, exact, exact))
