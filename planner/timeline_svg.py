"""Draw timelines of a step: ``python -m planner.timeline_svg [NAME ...]`` writes docs/images.

Each row is a configuration: its compute, its communication by mesh dim, and its memory. The rows of
a picture share their scales.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

import torch

from config import load_config
from planner.auto import GIB, without_data
from planner.roofline import peak_flops
from planner.simulate import simulate_step
from planner.step_plan import planned_config
from planner.step_record import (
    ACTIVATIONS,
    BACKWARD,
    FORWARD,
    GATHERED,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    RECOMPUTE,
    UPDATE,
)
from planner.timeline import COMPUTE, EventRecorder, Span, TimedRecord, Timeline, timeline_of
from run_spec import resolve
from runtime.devices import find_hardware

FOLDER = Path(__file__).parents[1] / "docs" / "images"
N_RANKS, DEVICE, MICROBATCHES = 16, "h100", 2
# Four blocks with a small vocabulary; as many tokens on each GPU in every row.
BASE = {
    "config": "llama3_8b",
    "model.args.n_layers": 4,
    "model.vocab_size": 32000,
    "training.seq_len": 4096,
    "training.local_batch_size": 1,
    "training.global_batch_size": 32,
    "activation_checkpoint.mode": "none",
    "compile.enable": "false",
    "parallelism.tensor_parallel_degree": 1,
}
Keys = dict[str, object]
EIGHT: Keys = {"training.local_batch_size": 8}
MODE = "parallelism.data_parallel"
RESHARD, REDUCE = (
    f"parallelism.fsdp_{key}" for key in ("reshard_after_forward", "reduce_gradients")
)
HYBRID: Keys = {"config": "qwen3_next_80b_a3b", "model.args.n_experts": 64}
NEVER: Keys = {RESHARD: "never"}
LAST: Keys = {REDUCE: "last_microbatch"}
TENSOR: Keys = EIGHT | {"parallelism.tensor_parallel_degree": 8}
CONTEXT: Keys = EIGHT | {"parallelism.context_parallel_degree": 8}
ALLGATHER: Keys = {"parallelism.context_parallel_method": "allgather"}
# Keys by title; the rows of each picture.
PICTURES: dict[str, dict[str, Keys]] = {
    "timeline_data_parallel": {
        "DDP": {MODE: "ddp"},
        "FSDP2, never and last_microbatch (nearly ZeRO-1)": NEVER | LAST,
        "FSDP2, never (nearly ZeRO-2)": NEVER,
        "FSDP2, default (ZeRO-3)": {},
        "HSDP: 2 replicas of 8 shards": {"parallelism.data_parallel_replicate_degree": 2},
        "SimpleFSDP, eager": {MODE: "simple_fsdp"},
    },
    "timeline_model_parallel": {
        "FSDP2 on 16": {},
        "tensor and sequence parallel 8, FSDP2 on 2": TENSOR,
        "context parallel 8 (ulysses), FSDP2 on 16": CONTEXT,
        "context parallel 8 (allgather), FSDP2 on 16": CONTEXT | ALLGATHER,
    },
    "timeline_hybrid": {
        "hybrid, FSDP2 on 16": HYBRID,
        "hybrid, tensor and sequence parallel 8": HYBRID | TENSOR,
        "hybrid, context parallel 8 (ulysses)": HYBRID | CONTEXT,
        "hybrid, context parallel 8 (allgather)": HYBRID | CONTEXT | ALLGATHER,
    },
}
CATEGORIES = (PARAMETERS, OPTIMIZER, GRADIENTS, GATHERED, ACTIVATIONS, "other")
# Light and dark: of Okabe and Ito, which color-blind readers tell apart.
COLORS = {
    FORWARD: ("#0072b2", "#56b4e9"),
    BACKWARD: ("#e69f00", "#f0b840"),
    UPDATE: ("#555555", "#bbbbbb"),
    "all_gather": ("#009e73", "#2ec79b"),
    "reduce_scatter": ("#cc79a7", "#e29cc4"),
    "all_reduce": ("#d55e00", "#ff8a3c"),
    "all_to_all": ("#7a4fbf", "#ab8ae6"),
    PARAMETERS: ("#0b4f7d", "#2f6f9e"),
    OPTIMIZER: ("#6b6b6b", "#8a8a8a"),
    GRADIENTS: ("#d08a00", "#c98f1d"),
    GATHERED: ("#009e73", "#1fa880"),
    ACTIVATIONS: ("#86bfe6", "#79aed3"),
    "other": ("#d9c7e8", "#a48fb8"),
}
WIDTH, LEFT, RIGHT, LANE, AREA = 960, 112, 16, 13, 110
# Pixels whose memory is shown as one.
COLUMN = 2


@dataclass(frozen=True)
class Row:
    """A configuration's record and its timeline."""

    title: str
    record: TimedRecord
    timeline: Timeline

    @property
    def lanes(self) -> list[str]:
        # A reduction of a few numbers is no lane.
        found: dict[str, float] = defaultdict(float)
        for span in self.timeline.spans:
            found[span.lane] += span.end - span.begin
        shown = [lane for lane, seconds in found.items() if seconds > 1e-3]
        return sorted(shown, key=lambda lane: (lane != COMPUTE, lane))

    @property
    def sent(self) -> float:
        groups, counts = self.record.groups, self.record.collectives.items()
        return sum(count * groups[key.dim].sent(key) for key, count in counts)


def main(names: list[str]) -> None:
    """Write the pictures of ``names``, by default all."""
    for name in names or PICTURES:
        (FOLDER / f"{name}.svg").write_text(picture(PICTURES[name]))
        print(FOLDER / f"{name}.svg")


def picture(rows: Mapping[str, Keys]) -> str:
    """Simulate and draw the configurations ``rows``."""
    return draw([simulated(title, keys) for title, keys in rows.items()])


def simulated(title: str, keys: Keys) -> Row:
    """Simulate a step of ``BASE`` with ``keys``."""
    hardware = find_hardware(DEVICE, None)
    values = {**BASE, **keys}
    name = str(values.pop("config"))
    texts = [text for key, value in values.items() for text in (f"--{key}", str(value))]
    config = planned_config(without_data(load_config(Path(name), texts)))
    run = replace(resolve(config, N_RANKS, has_gpu=True), config=config)
    weights = [1.0] * MICROBATCHES
    record = simulate_step(run, N_RANKS, 0, weights=weights, recorder_type=EventRecorder)
    assert isinstance(record, TimedRecord)
    return Row(title, record, timeline_of(record, hardware, peak_flops(config, hardware)))


def draw(rows: Sequence[Row]) -> str:
    """Return an SVG with one row each."""
    longest = max(row.timeline.seconds for row in rows)
    most = max(row.record.peak for row in rows)
    x_scale, y_scale = (WIDTH - LEFT - RIGHT) / longest, AREA / most
    parts, top = [*_legend()], 62
    for row in rows:
        area = max(round(row.record.peak * y_scale), 16)
        parts += [f'<g transform="translate(0 {top})">', *_row(row, area, x_scale, y_scale), "</g>"]
        top += 22 + (LANE + 3) * len(row.lanes) + area + 24
    return "\n".join([*_head(top, [row.title for row in rows]), *parts, "</svg>", ""])


def _head(height: int, titles: Sequence[str]) -> Iterator[str]:
    text = f"Timelines of a step, simulated with PyTorch {torch.__version__.partition('+')[0]}"
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
    yield f"<title>{escape(text)}</title><desc>{escape('; '.join(titles))}</desc><style>"
    yield "text { font: 12px system-ui, sans-serif; fill: var(--ink) } .n { fill: var(--dim) }"
    for number, (name, theme) in enumerate((("light", 0), ("dark", 1))):
        ink, dim, page = (("#1a1a1a", "#626262", "#ffffff"), ("#eaeaea", "#a4a4a4", "#15181c"))[
            theme
        ]
        colors = " ".join(f"--{_css(key)}: {pair[theme]};" for key, pair in COLORS.items())
        rule = f"svg {{ --ink: {ink}; --dim: {dim}; --page: {page}; {colors} }}"
        yield rule if number == 0 else f"@media (prefers-color-scheme: {name}) {{ {rule} }}"
    yield from (f".{_css(key)} {{ fill: var(--{_css(key)}) }}" for key in COLORS)
    yield f'</style><rect width="{WIDTH}" height="{height}" style="fill: var(--page)"/>'


def _css(name: str) -> str:
    return name.replace(" ", "-").replace("_", "-")


def _legend() -> Iterator[str]:
    groups = {
        "compute": (FORWARD, BACKWARD, UPDATE),
        "communication": ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"),
        "memory": CATEGORIES,
    }
    for y, (title, names) in enumerate(groups.items()):
        yield f'<text x="8" y="{16 + 18 * y}" class="n">{title}</text>'
        for index, name in enumerate(names):
            x, key = LEFT + 132 * index, _css(name)
            yield f'<rect class="{key}" x="{x}" y="{7 + 18 * y}" width="10" height="10"/>'
            text = name.replace("_", "-")
            yield f'<text x="{x + 15}" y="{16 + 18 * y}">{text}</text>'


def _row(row: Row, area: int, x_scale: float, y_scale: float) -> Iterator[str]:
    timeline = row.timeline
    facts = f"{timeline.seconds * 1e3:.0f} ms, {row.record.peak / GIB:.1f} GiB at the peak"
    facts += f", {row.sent / GIB:.1f} GiB sent"
    yield f'<text x="{LEFT}" y="14" font-weight="600">{escape(row.title)}</text>'
    yield f'<text x="{WIDTH - RIGHT}" y="14" text-anchor="end">{facts}</text>'
    y = 22
    for lane in row.lanes:
        yield f'<text x="{LEFT - 8}" y="{y + 11}" text-anchor="end" class="n">{lane}</text>'
        for span in _merged([s for s in timeline.spans if s.lane == lane], 0.4 / x_scale):
            x, width = LEFT + span.begin * x_scale, (span.end - span.begin) * x_scale
            size = f'x="{x:.1f}" y="{y}" width="{max(width, 0.2):.1f}" height="{LANE}"'
            yield f'<rect class="{_css(span.kind)}" {size}/>'
        y += LANE + 3
    floor = y + 3 + area
    yield from _memory(timeline, floor, x_scale, y_scale)
    peak = floor - row.record.peak * y_scale
    yield f'<text x="{LEFT - 8}" y="{floor}" text-anchor="end" class="n">memory</text>'
    end = LEFT + timeline.seconds * x_scale
    yield f'<path d="M{LEFT} {peak:.1f}H{end:.1f}" stroke="var(--dim)" stroke-dasharray="2 3"/>'


def _merged(spans: Sequence[Span], gap: float) -> list[Span]:
    """Join neighbors of one kind that are closer than ``gap``; recomputation is backward."""
    joined: list[Span] = []
    for span in spans:
        kind = BACKWARD if span.kind == RECOMPUTE else span.kind
        last = joined[-1] if joined else None
        # Calls of collectives stay apart, so that they can be counted.
        room = gap if span.lane == COMPUTE else 0.05 * gap
        if last is not None and last.kind == kind and span.begin - last.end < room:
            joined[-1] = replace(last, end=span.end)
        else:
            joined.append(replace(span, kind=kind))
    return joined


def _memory(timeline: Timeline, floor: int, x_scale: float, y_scale: float) -> Iterator[str]:
    """Areas of bytes by category, each over earlier ones; a column has its largest total."""
    columns: dict[int, Counter[str]] = {}
    for time, held in timeline.memory:
        x = LEFT + COLUMN * round(time * x_scale / COLUMN)
        if x not in columns or held.total() > columns[x].total():
            columns[x] = held
    end = LEFT + round(timeline.seconds * x_scale)
    for count in range(len(CATEGORIES), 0, -1):
        shown = CATEGORIES[:count]
        path, last = f"M{LEFT} {floor}", ""
        for x, held in columns.items():
            height = sum(_bytes(held, category) for category in shown) * y_scale
            level = f"{floor - height:.1f}"
            path += "" if level == last else f"H{x}V{level}"
            last = level
        yield f'<path class="{_css(shown[-1])}" d="{path}H{end}V{floor}Z"/>'


def _bytes(held: Counter[str], category: str) -> int:
    if category != "other":
        return held[category]
    return held.total() - sum(held[name] for name in CATEGORIES)


if __name__ == "__main__":
    main(sys.argv[1:])
