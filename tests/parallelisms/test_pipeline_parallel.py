"""Layers of each pipeline stage."""

import pytest

from parallelisms.pipeline_parallel import stage_layers


@pytest.mark.parametrize(
    ("n_layers", "n_stages", "less_first", "less_last", "sizes"),
    [
        (8, 4, 0, 0, [2, 2, 2, 2]),
        # The layers that are left over go to late stages.
        (5, 3, 0, 0, [1, 2, 2]),
        (4, 3, 0, 0, [1, 1, 2]),
        (8, 2, 2, 0, [3, 5]),
        (8, 2, 0, 2, [5, 3]),
        (10, 4, 1, 1, [2, 3, 3, 2]),
        (3, 3, 2, 0, [1, 1, 1]),
    ],
)
def test_layers_are_balanced(
    n_layers: int, n_stages: int, less_first: int, less_last: int, sizes: list[int]
) -> None:
    found = stage_layers(n_layers, n_stages, less_first=less_first, less_last=less_last)
    assert [len(stage) for stage in found] == sizes
    assert [layer for stage in found for layer in stage] == list(range(n_layers))
