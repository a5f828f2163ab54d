"""Any mesh of GPUs matches one CPU: the cells of test_parity.py that fit here, with NCCL."""

import pytest

from tests.lib.cells import FAST, NAMED, Cell
from tests.lib.marks import skip_without_gpus
from tests.lib.parity import assert_cell_matches_one_device
from tests.lib.ranks import RankPool


@pytest.mark.gpu
@pytest.mark.parametrize("cell", [*NAMED, *FAST.cells], ids=str)
def test_cell_on_gpus_matches_one_device(ranks: RankPool, cell: Cell) -> None:
    skip_without_gpus(cell.world_size)
    assert_cell_matches_one_device(ranks, cell, "cuda")
