"""Random meshes and options train as one device does, in float64.

``tests/parallelisms/test_parity.py`` has every pair of options; these cells also combine many.
"""

import random
from collections.abc import Callable, Iterator

import pytest

from tests.lib.cells import DIMENSIONS, Cell, is_valid
from tests.lib.parity import assert_cell_matches_one_device
from tests.lib.ranks import RankPool

COUNT, USUALLY = 300, 3
# Probability of an option other than the neutral one. Compilation takes minutes on many ranks.
RATES = {"compile": 0.05, "model": 0.8}
RATE = 0.4


def sample(rng: random.Random) -> Cell:
    """Sample a valid cell of 2 to 8 ranks."""
    while True:
        row = {
            name: rng.choice(others) if rng.random() < RATES.get(name, RATE) else neutral
            for name, (neutral, *others) in DIMENSIONS.items()
        }
        cell = Cell(**row)
        if 2 <= cell.world_size <= 8 and is_valid(cell):
            return cell


@pytest.mark.row(41, "Random meshes and options train as one device does")
def test_random_cell_matches_one_device(
    ranks: RankPool,
    seeds: Callable[..., Iterator[int]],
    record_result: Callable[[str], None],
) -> None:
    cells = []
    for seed in seeds(COUNT, USUALLY):
        cells.append(sample(random.Random(seed)))
        print(f"seed {seed}: {cells[-1]}")
        assert_cell_matches_one_device(ranks, cells[-1])
    sizes = [cell.world_size for cell in cells]
    record_result(
        f"{len(cells)} sampled cells of {min(sizes)} to {max(sizes)} ranks equal one device in"
        " float64: losses, norms, gradients, and weights after two steps"
    )
