"""A run's schedule as a drawing of text: learning rate and batch size over steps and tokens."""

from bisect import bisect_left
from collections.abc import Sequence

from report.schedule_plan import SchedulePlan
from runtime.log import short_number

# Columns and rows of a curve; with the names on its left, a terminal of 80 columns has room.
COLUMNS, ROWS, NAME_WIDTH = 66, 4, 12
BLOCKS = " ▁▂▃▄▅▆▇█"


def draw_schedule(plan: SchedulePlan) -> list[str]:
    """Lines of at most 80 columns: the learning rate, the batch if it ramps, and their axes."""
    first, last = plan.steps[0], plan.steps[-1]
    n_columns = min(COLUMNS, len(plan.steps))
    places = [first + (last - first) * i // max(n_columns - 1, 1) for i in range(n_columns)]
    shown = [min(bisect_left(plan.steps, step), len(plan.steps) - 1) for step in places]
    lines = _curve("lr", f"{max(plan.lr):.3g}", [plan.lr[i] for i in shown], ROWS)
    if len(set(plan.batch_tokens)) > 1:
        sizes = [float(plan.batch_tokens[i]) for i in shown]
        lines += _curve("batch", short_number(max(sizes)), sizes, ROWS // 2)
    marked = sorted({0, *_bends(plan), len(plan.steps) - 1})
    ticks = [(bisect_left(places, plan.steps[i]), i) for i in marked]
    axis = ["─"] * n_columns
    for column, _ in ticks:
        axis[column] = "┴"
    texts = {
        "step": [(column, f"{plan.steps[i]:,}") for column, i in ticks],
        "tokens": [(column, short_number(plan.tokens[i])) for column, i in ticks],
    }
    lines.append(" " * NAME_WIDTH + "└" + "".join(axis))
    return lines + [f"{name:<{NAME_WIDTH}} {_labels(each)}" for name, each in texts.items()]


def _curve(name: str, largest: str, values: Sequence[float], n_rows: int) -> list[str]:
    """Draw columns up to ``values``; the first row's top is the largest one, named on its left."""
    top = max(values) or 1.0
    # Whatever is not zero is seen.
    eighths = [max(round(8 * n_rows * value / top), int(value > 0)) for value in values]
    heads = [f"{name}{largest:>{NAME_WIDTH - 1 - len(name)}} ", *[" " * NAME_WIDTH] * (n_rows - 1)]
    rows = []
    for row, head in zip(reversed(range(n_rows)), heads, strict=True):
        cells = "".join(BLOCKS[min(max(eighth - 8 * row, 0), 8)] for eighth in eighths)
        rows.append(f"{head}│{cells}".rstrip())
    return rows


def _bends(plan: SchedulePlan) -> list[int]:
    """Indices of the steps that first and last have the largest learning rate."""
    peak = max(plan.lr)
    at_peak = [i for i, lr in enumerate(plan.lr) if lr == peak]
    return [at_peak[0], at_peak[-1]]


def _labels(labels: Sequence[tuple[int, str]]) -> str:
    """Place texts at their columns; one that would touch the one before it, or the end, is left
    out. The last one ends at its column."""
    last_column, last_text = labels[-1]
    end = max(last_column + 1, len(last_text))
    limit = end - len(last_text) if len(labels) > 1 else end + 1
    line = ""
    for column, text in labels[:-1]:
        if (not line or column > len(line)) and column + len(text) < limit:
            line = line.ljust(column) + text
    return line + last_text.rjust(end - len(line))
