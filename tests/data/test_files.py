import pytest

from data.files import evenly_spaced, find_shard


def test_find_shard_numbers_documents_in_order() -> None:
    counts, ends = [0, 2, 0, 3, 1], [0, 2, 2, 5, 6]
    expected = [(file, index) for file, count in enumerate(counts) for index in range(count)]
    assert [find_shard(ends, index) for index in range(6)] == expected


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 127, 128, 1000, 10**12])
def test_samples_are_evenly_spaced(count: int) -> None:
    indices = evenly_spaced(count, 64)
    assert len(indices) == count if count < 64 else 32 <= len(indices) <= 64
    assert count == 0 or (indices[0] == 0 and count - indices.step <= indices[-1] < count)
