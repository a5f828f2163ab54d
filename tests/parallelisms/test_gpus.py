"""Any mesh of GPUs matches one CPU: the checks of test_parity.py, with NCCL."""

import pytest
import torch

from config.job_config import Optimizer
from tests.layouts import CP, METHOD, MODE, PP, REPLICATE, SCHEDULE, TP, Layout
from tests.parallelisms.test_parity import check_layout
from tests.ranks import RankPool

COUNT = torch.cuda.device_count()
GATHER = {METHOD: "allgather"}
LAYOUTS = [
    Layout(1),
    Layout(2),
    Layout(2, {MODE: "simple_fsdp"}),
    Layout(2, {MODE: "ddp"}),
    Layout(2, {TP: 2}),
    Layout(2, {CP: 2}),
    Layout(2, {CP: 2} | GATHER),
    Layout(2, {PP: 2}),
    Layout(2, {PP: 2, SCHEDULE: "Interleaved1F1B"}),
    Layout(4, {REPLICATE: 2}),
    Layout(4, {TP: 4}),
    Layout(4, {CP: 2, TP: 2}),
    Layout(8, {PP: 2, CP: 2, TP: 2} | GATHER),
]


@pytest.mark.gpu
@pytest.mark.parametrize("document_mask", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layout_on_gpus_matches_one_device(
    ranks: RankPool, layout: Layout, document_mask: bool
) -> None:
    if layout.world_size > COUNT:
        pytest.skip(f"needs {layout.world_size} GPUs")

    ranks.run(_check, layout.world_size, layout, document_mask)


def _check(layout: Layout, document_mask: bool, optimizer: str = "adamw") -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    config = Optimizer(name=optimizer, lr=1e-2)
    check_layout("qwen3", True, layout, document_mask=document_mask, device=device, config=config)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [Layout(1), Layout(2), Layout(4, {TP: 2})], ids=str)
def test_muon_on_gpus_matches_one_device(ranks: RankPool, layout: Layout) -> None:
    if layout.world_size > COUNT:
        pytest.skip(f"needs {layout.world_size} GPUs")
    ranks.run(_check, layout.world_size, layout, False, "muon")
