"""Experts on any mesh compute what one device computes: routing, balance loss, every gradient."""

import pytest

from config.job_config import ActivationCheckpoint
from tests.layouts import CP, METHOD, MODE, PP, REPLICATE, SCHEDULE, TP, Layout
from tests.parallelisms.test_parity import check_layout
from tests.ranks import RankPool

EP, GATHER = "expert_parallel_degree", {METHOD: "allgather"}
LAYOUTS = [
    Layout(2),
    Layout(2, {MODE: "ddp"}),
    Layout(2, {MODE: "simple_fsdp"}),
    Layout(2, {EP: 2}),
    Layout(4, {EP: 2}),
    Layout(4, {EP: 4}),
    Layout(4, {EP: 2, REPLICATE: 2}),
    Layout(2, {TP: 2}),
    Layout(4, {TP: 2, EP: 4}),
    Layout(4, {TP: 2, EP: 2}),
    Layout(2, {CP: 2}),
    Layout(4, {CP: 2, EP: 2} | GATHER),
    Layout(4, {CP: 2, TP: 2, EP: 4}),
    Layout(2, {PP: 2}),
    Layout(4, {PP: 2, EP: 2}),
    Layout(8, {PP: 2, CP: 2, TP: 2, EP: 4}),
    Layout(8, {EP: 4, TP: 2, REPLICATE: 2}),
    Layout(2, {EP: 2}, recompute=ActivationCheckpoint(mode="full")),
    Layout(2, {EP: 2}, recompute=ActivationCheckpoint(mode="selective")),
    Layout(4, {PP: 2, EP: 2, SCHEDULE: "Interleaved1F1B"}),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layout_matches_one_device(ranks: RankPool, layout: Layout) -> None:
    ranks.run(check_layout, layout.world_size, "qwen3_moe", False, layout)
