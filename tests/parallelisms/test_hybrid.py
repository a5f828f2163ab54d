"""Gated delta nets on any mesh compute what one device computes, packed documents too."""

from functools import partial

import pytest

from config.job_config import ActivationCheckpoint
from tests.layouts import CP, METHOD, MODE, PP, REPLICATE, TP, Layout
from tests.parallelisms.test_parity import check_layout
from tests.ranks import RankPool

EP, GATHER = "expert_parallel_degree", {METHOD: "allgather"}
LAYOUTS = [
    Layout(2),
    Layout(2, {MODE: "ddp"}),
    Layout(2, {MODE: "simple_fsdp"}),
    Layout(2, {CP: 2}),
    Layout(2, {CP: 2} | GATHER),
    # More ranks than key heads.
    Layout(4, {CP: 4}),
    Layout(4, {CP: 4} | GATHER),
    Layout(4, {CP: 2, EP: 2}),
    Layout(4, {CP: 2, REPLICATE: 2}),
    Layout(2, {TP: 2}),
    Layout(4, {TP: 2, EP: 2}),
    Layout(4, {TP: 2, REPLICATE: 2}),
    # One key head for each tensor parallel rank, and its value heads for the context's.
    Layout(4, {TP: 2, CP: 2}),
    Layout(4, {TP: 2, CP: 2, EP: 4} | GATHER),
    Layout(4, {PP: 2, TP: 2}),
    Layout(2, {PP: 2}),
    Layout(4, {PP: 2, CP: 2} | GATHER),
    Layout(8, {CP: 4, EP: 4, REPLICATE: 2}),
    Layout(2, {CP: 2}, recompute=ActivationCheckpoint(mode="full")),
    Layout(2, {CP: 2}, recompute=ActivationCheckpoint(mode="selective")),
]


@pytest.mark.parametrize("document_mask", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layout_matches_one_device(ranks: RankPool, layout: Layout, document_mask: bool) -> None:
    check = partial(check_layout, document_mask=document_mask)
    ranks.run(check, layout.world_size, "qwen3_next", False, layout)
