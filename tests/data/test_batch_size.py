"""Batch size ramps against a list of all sizes."""

import pytest

from data.batch_size import batch_size_of, sequences_in

FINAL = 8


@pytest.mark.parametrize("ramp", [(), ((3, 2),), ((1, 1), (4, 2), (2, 6)), [[2, 4], [1, 6]]])
def test_sizes_follow_the_ramp(ramp) -> None:
    sizes = [size for steps, size in ramp for _ in range(steps)] + 3 * [FINAL]
    steps = range(1, len(sizes) + 1)
    assert [batch_size_of(step, ramp, FINAL) for step in steps] == sizes
    assert [sequences_in(n, ramp, FINAL) for n in (0, *steps)] == [
        sum(sizes[:n]) for n in (0, *steps)
    ]
