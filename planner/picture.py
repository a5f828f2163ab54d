"""Draws a plan as SVG: memory of a rank by category, and time of a step by what takes it."""

from collections.abc import Sequence
from html import escape

from planner.roofline import StepTime
from planner.step_plan import StepPlan
from runtime.devices import Hardware

GIB = 1 << 30
# In the first bytes of each picture.
MARK = "<!-- Shardloom plan -->"
WIDTH, LEFT, BAR = 920, 40, 26
# Colors that are distinct on white and on black, also by most who are color-blind.
COLORS = (
    "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#999999", "#ee7733",
    "#009988", "#bb5566",
)  # fmt: skip
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #222 }
.title { font-weight: 600; font-size: 15px }
.page { fill: #fff }
.frame { fill: none; stroke: #888 }
.limit { stroke: #c00; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
  text { fill: #ddd }
  .page { fill: #151515 }
  .limit { stroke: #f66 }
}
"""


def picture(plan: StepPlan, time: StepTime, hardware: Hardware) -> str:
    """Return an SVG image with a bar of memory for each stage, and one of time."""
    capacity = hardware.device.memory_gib
    peaks = [stage.record.peak / GIB for stage in plan.stages]
    scale = (WIDTH - 2 * LEFT) / max(capacity, *peaks)
    model = f"{plan.run.config.model.name} {plan.run.config.model.flavor}"
    title = f"{model} on {plan.world_size:,} of {hardware.device.title}"
    lines, y = [_text(LEFT, 30, title, "title")], 60
    categories = [
        key
        for key in plan.stages[0].record.memory
        if any(stage.record.memory[key] > 0.005 * stage.record.peak for stage in plan.stages)
    ]
    for stage, peak in zip(plan.stages, peaks, strict=True):
        name = f" of stage {stage.stage}" if plan.degrees.pp > 1 else ""
        lines.append(_text(LEFT, y, f"memory of a rank{name} at its peak: {peak:.1f} GiB"))
        sizes = [stage.record.memory[key] / GIB for key in categories]
        lines += _bar(y + 8, sizes, scale)
        x = LEFT + capacity * scale
        limit = f"limit: {capacity:g} GiB"
        lines.append(f'<text x="{x:.1f}" y="{y - 4}" text-anchor="end">{limit}</text>')
        lines.append(f'<path class="limit" d="M{x:.1f} {y + 2}v{BAR + 12}"/>')
        y += BAR + 38
    held = [max(stage.record.memory[key] for stage in plan.stages) / GIB for key in categories]
    labels = [f"{key} {size:.1f} GiB" for key, size in zip(categories, held, strict=True)]
    lines, y = [*lines, *_legend(y, labels)], y + 24 * (-(-len(labels) // 3)) + 30
    parts = {name: seconds for name, seconds in time.parts.items() if seconds > 0}
    rate = time.tokens_per_second / plan.world_size
    heading = f"time of a step, modelled: {time.seconds:.3g} s, {rate:,.0f} tokens/s on a device"
    lines.append(_text(LEFT, y, heading))
    lines += _bar(y + 8, list(parts.values()), (WIDTH - 2 * LEFT) / time.seconds)
    y += BAR + 34
    labels = [f"{name} {100 * s / time.seconds:.1f} %" for name, s in parts.items()]
    lines, y = [*lines, *_legend(y, labels)], y + 24 * (-(-len(labels) // 3))
    return "\n".join(
        [
            MARK,
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}"'
            f' width="{WIDTH}" height="{y}" role="img">',
            f"<title>{escape(title)}</title><style>{STYLE}</style>",
            f'<rect class="page" width="{WIDTH}" height="{y}"/>',
            *lines,
            "</svg>\n",
        ]
    )


def _bar(y: float, values: Sequence[float], scale: float) -> list[str]:
    """Values side by side."""
    lines, x = [], float(LEFT)
    for value, color in zip(values, COLORS * 2, strict=False):
        lines.append(
            f'<rect x="{x:.1f}" y="{y}" width="{value * scale:.2f}" height="{BAR}" fill="{color}"/>'
        )
        x += value * scale
    frame = f'<rect class="frame" x="{LEFT}" y="{y}" width="{WIDTH - 2 * LEFT}" height="{BAR}"/>'
    return [*lines, frame]


def _legend(y: float, labels: Sequence[str]) -> list[str]:
    """Labels in three columns, with the colors of a bar."""
    lines = []
    for index, (label, color) in enumerate(zip(labels, COLORS * 2, strict=False)):
        x, row = LEFT + (index % 3) * (WIDTH - 2 * LEFT) // 3, y + 24 * (index // 3)
        lines.append(f'<rect x="{x}" y="{row - 11}" width="12" height="12" fill="{color}"/>')
        lines.append(_text(x + 18, row, label))
    return lines


def _text(x: float, y: float, text: str, css: str = "") -> str:
    return f'<text x="{x}" y="{y}" class="{css}">{escape(text)}</text>'
