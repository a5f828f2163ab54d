"""A save that cannot be written is known at once, harms no older one, and ends no training."""

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner_helpers import _create_write_items

from checkpoint.storage import ALIGNMENT, HashedFile, write_parts
from checkpoint.store import problems_of
from runtime.log import logger
from tests.checkpoint.small_run import Run
from tests.layouts import Layout
from tests.ranks import RankPool

TWO = Layout(2)
ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT)


@contextmanager
def failing_write(nth: int, error: int) -> Iterator[None]:
    """The ``nth`` write to any file of this rank fails."""
    left = nth
    original = HashedFile.write

    def write(self: HashedFile, data: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise OSError(error, "planted")
        original(self, data)

    with patch.object(HashedFile, "write", write):
        yield


@contextmanager
def limited_files(n_bytes: int) -> Iterator[None]:
    """The kernel lets no file grow beyond that (EFBIG)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def swallowing_write() -> AbstractContextManager[Any]:
    """The fault that all this is there to find: an error that nobody hears of."""
    original = HashedFile.write

    def write(self: HashedFile, data: Any) -> None:
        original(self, data[: len(data) // 2])
        self.size += len(data) - len(data) // 2

    return patch.object(HashedFile, "write", write)


def save_badly(
    folder: Path, mode: str, faults: list[tuple[int, Callable[[], AbstractContextManager[Any]]]]
) -> list[tuple[int, str]]:
    """After a good save, one bad and one good for each fault: of rank ``rank`` alone.

    Returns the step that counts as the newest after each, and what the alarm said.
    """
    run = Run(folder, TWO, keep_latest_k=1, async_mode=mode)
    run.save(1)
    found = []
    for step, (rank, fault) in enumerate(faults, start=1):
        with patch.object(logger, "error") as alarm:
            with fault() if dist.get_rank() == rank else nullcontext():
                run.save(2 * step)
            assert run.checkpointer.newest == 2 * step - 1
            if dist.get_rank() == 0:
                assert not list(folder.glob(".tmp-*")), "it takes room"
            assert not problems_of(folder / f"step-{2 * step - 1:08d}")
        found.append((run.checkpointer.newest, str(alarm.call_args)))
        run.save(2 * step + 1)
        assert run.checkpointer.newest == 2 * step + 1
    run.checkpointer.close()
    return found


@pytest.mark.row(4, "A write error is never taken for success, and ends no training")
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_every_write_error_is_an_alarm_and_no_more(
    ranks: RankPool,
    tmp_path: Path,
    mode: str,
    trials: Callable[[int], int],
    seen: Callable[[str], None],
) -> None:
    cases = list(product((0, 1), ERRORS, range(1, 20, 3)))
    n_errors = trials(len(cases) * 5)
    faults: list[Any] = [
        (rank, partial(failing_write, nth, error))
        for rank, error, nth in cases[:: max(1, len(cases) // n_errors)]
    ]
    faults += [(rank, partial(limited_files, n_bytes)) for rank in (0, 1) for n_bytes in (0, 5000)]
    for found in ranks.run(save_badly, 2, tmp_path, mode, faults):
        assert all("was not saved" in alarm for _, alarm in found)
    assert {path.name for path in tmp_path.iterdir()} == {f"step-{2 * len(faults) + 1:08d}"}
    seen(f"{mode}: {len(faults)} of {len(faults)} known at once; the next save succeeded")


def test_an_error_that_is_swallowed_is_found(ranks: RankPool, tmp_path: Path) -> None:
    faults = [(rank, swallowing_write) for rank in (0, 1)]
    for found in ranks.run(save_badly, 2, tmp_path, "disabled", faults):
        assert all("was not saved" in alarm for _, alarm in found)


def test_what_is_closed_survives_a_power_cut(tmp_path: Path) -> None:
    sizes: list[int] = []
    with patch("checkpoint.storage.os.fsync", lambda fd: sizes.append(os.fstat(fd).st_size)):
        file = HashedFile(tmp_path / "file")
        file.write(b"all of it")
        file.close()
    assert sizes == [9]


def test_no_file_is_written_twice(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        HashedFile(tmp_path / "file")


def test_parts_begin_where_any_dtype_can(tmp_path: Path) -> None:
    tensors = {"odd": torch.ones(3, dtype=torch.bfloat16), "wide": torch.ones(2)}
    items = [item for name, t in tensors.items() for item in _create_write_items(name, t)]
    _, entries = write_parts(tmp_path / "file", items, lambda item: tensors[item.index.fqn])
    assert [part.start % ALIGNMENT for e in entries.values() for part in e.parts] == [0, 0]
