import pytest

from data.files import locate, spread


def test_documents_are_located_in_order() -> None:
    counts, ends = [0, 2, 0, 3, 1], [0, 2, 2, 5, 6]
    places = [(file, place) for file, count in enumerate(counts) for place in range(count)]
    assert [locate(ends, index) for index in range(6)] == places


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 127, 128, 1000, 10**12])
def test_a_few_are_spread_over_all(count: int) -> None:
    indices = spread(count, 64)
    assert len(indices) == count if count < 64 else 32 <= len(indices) <= 64
    assert count == 0 or (indices[0] == 0 and count - indices.step <= indices[-1] < count)
