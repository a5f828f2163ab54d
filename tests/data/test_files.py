import errno
import os
from pathlib import Path
from unittest.mock import patch

import pytest

from data.files import evenly_spaced, find_shard, relative_names
from data.matching import file_status
from data.token_files import _check_size, read_index


def test_name_that_is_not_utf_8_is_an_error() -> None:
    path = Path("/corpus/caf\udce9.txt")
    with pytest.raises(ValueError, match=r"data\.path: the name 'caf\\udce9\.txt' is not UTF-8"):
        relative_names("/corpus/*.txt", [path])


@pytest.mark.parametrize(
    ("code", "kind"),
    [(errno.ESTALE, OSError), (errno.ETIMEDOUT, OSError), (errno.EACCES, ValueError)],
)
def test_only_errors_that_may_pass_are_left_to_a_restart(code: int, kind: type[Exception]) -> None:
    path, error = Path("/data/a.bin"), OSError(code, os.strerror(code))
    readers = (file_status, read_index, lambda path: _check_size(path, 1))
    for read in readers:
        with (
            patch("pathlib.Path.stat", side_effect=error),
            patch("os.open", side_effect=error),
            pytest.raises(kind, match=rf"^data\.path: /data/.*{os.strerror(code)}") as caught,
        ):
            read(path)
        assert isinstance(caught.value, OSError) == (kind is OSError)


def test_find_shard_numbers_documents_in_order() -> None:
    counts, ends = [0, 2, 0, 3, 1], [0, 2, 2, 5, 6]
    expected = [(file, index) for file, count in enumerate(counts) for index in range(count)]
    assert [find_shard(ends, index) for index in range(6)] == expected


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 127, 128, 1000, 10**12])
def test_samples_are_evenly_spaced(count: int) -> None:
    indices = evenly_spaced(count, 64)
    assert len(indices) == count if count < 64 else 32 <= len(indices) <= 64
    assert count == 0 or (indices[0] == 0 and count - indices.step <= indices[-1] < count)
