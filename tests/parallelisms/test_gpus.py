"""Any mesh of GPUs matches one CPU: the cells of test_parity.py that fit here, with NCCL."""

import pytest
import torch

from tests.lib.cells import FAST, NAMED, Cell
from tests.lib.parity import assert_cell_matches_one_device
from tests.lib.ranks import RankPool


@pytest.mark.gpu
@pytest.mark.parametrize("cell", [*NAMED, *FAST.cells], ids=str)
def test_cell_on_gpus_matches_one_device(ranks: RankPool, cell: Cell) -> None:
    if cell.world_size > torch.cuda.device_count():
        pytest.skip(f"needs {cell.world_size} GPUs")
    assert_cell_matches_one_device(ranks, cell, "cuda")
