"""Committed timelines are what the planner records."""

import re
from collections import Counter
from html import unescape
from itertools import pairwise

import pytest
import torch

from planner.auto import GIB
from planner.timeline import COMPUTE
from planner.timeline_svg import FOLDER, PICTURES, TENSOR, Row, picture, simulated

FAST = "timeline_model_parallel"


@pytest.mark.parametrize("name", PICTURES)
def test_committed_picture_is_what_is_simulated(name: str, request: pytest.FixtureRequest) -> None:
    if name != FAST and not request.config.getoption("--full"):
        pytest.skip("needs --full")
    committed = (FOLDER / f"{name}.svg").read_text()
    version = re.search(r"simulated with PyTorch ([\d.]+)", committed)
    assert version is not None
    if not torch.__version__.startswith(version[1]):
        pytest.skip(f"committed by PyTorch {version[1]}, of which other releases differ")
    again = "run: ./shardloom python -m planner.timeline_svg"
    assert committed == picture(PICTURES[name]), again


def test_page_has_the_numbers_of_the_committed_pictures() -> None:
    facts = re.compile(
        r'weight="600">(.*?)</text>\n.*"end">(\d+) ms, (\S+) GiB at the peak, (\S+) GiB sent<'
    )
    data, model, hybrid = (
        {unescape(title): values for title, *values in facts.findall(text)}
        for text in ((FOLDER / f"{name}.svg").read_text() for name in PICTURES)
    )
    assert [[*rows] for rows in (data, model, hybrid)] == [[*rows] for rows in PICTURES.values()]
    (_, ddp, _), *zero, (_, hsdp, _), (_, simple, _) = data.values()
    fsdp, tensor, *_ = (int(ms) for ms, _, _ in model.values())
    alone, by_tensor, ulysses, allgather = (ms for ms, _, _ in hybrid.values())
    memory = sorted(float(gib) for _, gib, _ in hybrid.values())
    page = " ".join((FOLDER.parent / "data_parallel.md").read_text().split())
    for text in (
        f"holds everything on each rank, {ddp} GiB",
        "hold {}, {} and {} GiB".format(*(gib for _, gib, _ in zero)),
        "send {}, {} and {} GiB".format(*(sent for _, _, sent in zero)),
        f"It holds {hsdp} GiB, because each node has a replica",
        f"It holds least, {simple} GiB",
        f"The step takes {tensor / fsdp:.1f} times as long",
        f"FSDP2 alone takes {alone} ms, context parallel {ulysses} and {allgather} ms",
        f"tensor parallel {by_tensor} ms",
        f"nearly the same, {memory[0]} to {memory[-1]} GiB",
    ):
        assert text in page


@pytest.fixture(scope="module")
def row() -> Row:
    return simulated("tensor parallel", {**TENSOR, "model.args.n_layers": 1})


def test_a_lane_does_one_thing_at_a_time(row: Row) -> None:
    lanes = Counter(span.lane for span in row.timeline.spans)
    assert {COMPUTE, "tp", "dp_shard_cp"} <= {*lanes}
    for lane in lanes:
        spans = [span for span in row.timeline.spans if span.lane == lane]
        assert all(first.end <= second.begin for first, second in pairwise(spans))


def test_all_collectives_and_the_peak_are_shown(row: Row) -> None:
    recorded = Counter[tuple[str, str]]()
    for collective, count in row.record.collectives.items():
        recorded[collective.dim, collective.kind] += round(count)
    shown = Counter((s.lane, s.kind) for s in row.timeline.spans if s.lane != COMPUTE)
    assert shown == recorded
    assert max(held.total() for _, held in row.timeline.memory) == row.record.peak > GIB


def test_compute_waits_for_tensor_parallel_only(row: Row) -> None:
    computing = [span for span in row.timeline.spans if span.lane == COMPUTE]
    for lane, is_waited_for in (("tp", True), ("dp_shard_cp", False)):
        reduced = [
            each
            for each in row.timeline.spans
            if (each.lane, each.kind) == (lane, "reduce_scatter")
        ]
        overlaps = [
            reduction
            for reduction in reduced[:-1]
            if any(c.begin < reduction.end and reduction.begin < c.end for c in computing)
        ]
        assert bool(overlaps) is not is_waited_for
