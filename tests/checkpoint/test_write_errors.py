"""A failed save is reported at once, harms no older checkpoint and does not stop training."""

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

from checkpoint.checkpoint_dir import verify_checkpoint
from checkpoint.tensor_files import ALIGNMENT, HashedFile, write_tensor_file
from runtime.log import logger
from tests.lib.layouts import Layout
from tests.lib.ranks import RankPool
from tests.lib.small_run import Run

TWO = Layout(2)
ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT)


@contextmanager
def failing_write(nth: int, error: int) -> Iterator[None]:
    """Make the ``nth`` write of this rank fail."""
    remaining = nth
    original = HashedFile.write

    def write(self: HashedFile, data: Any) -> None:
        nonlocal remaining
        remaining -= 1
        if remaining == 0:
            raise OSError(error, "planted")
        original(self, data)

    with patch.object(HashedFile, "write", write):
        yield


@contextmanager
def file_size_limit(n_bytes: int) -> Iterator[None]:
    """Limit the size of any file (RLIMIT_FSIZE): writes beyond it raise EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def silent_short_write() -> AbstractContextManager[Any]:
    """Write half of the data without an error: the fault that verification must find."""
    original = HashedFile.write

    def write(self: HashedFile, data: Any) -> None:
        original(self, data[: len(data) // 2])
        self.size += len(data) - len(data) // 2

    return patch.object(HashedFile, "write", write)


def save_with_faults(
    folder: Path, mode: str, faults: list[tuple[int, Callable[[], AbstractContextManager[Any]]]]
) -> list[tuple[int, str]]:
    """For each fault, on its rank only: one save that fails, then one that succeeds.

    Returns the newest step after each fault, and the logged error.
    """
    run = Run(folder, TWO, keep_latest_k=1, async_mode=mode)
    run.save(1)
    found = []
    for step, (rank, fault) in enumerate(faults, start=1):
        with patch.object(logger, "error") as alarm:
            with fault() if dist.get_rank() == rank else nullcontext():
                run.save(2 * step)
            assert run.checkpointer.newest_step == 2 * step - 1
            if dist.get_rank() == 0:
                assert not list(folder.glob(".tmp-*")), "a failed save frees its disk space"
            assert not verify_checkpoint(folder / f"step-{2 * step - 1:08d}")
        found.append((run.checkpointer.newest_step, str(alarm.call_args)))
        run.save(2 * step + 1)
        assert run.checkpointer.newest_step == 2 * step + 1
    run.checkpointer.close()
    return found


@pytest.mark.row(4, "A write error is never taken for success, and ends no training")
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_write_error_is_logged_and_training_goes_on(
    ranks: RankPool,
    tmp_path: Path,
    mode: str,
    trials: Callable[[int], int],
    record_result: Callable[[str], None],
) -> None:
    cases = list(product((0, 1), ERRORS, range(1, 20, 3)))
    n_errors = trials(len(cases) * 5)
    faults: list[Any] = [
        (rank, partial(failing_write, nth, error))
        for rank, error, nth in cases[:: max(1, len(cases) // n_errors)]
    ]
    faults += [
        (rank, partial(file_size_limit, n_bytes)) for rank in (0, 1) for n_bytes in (0, 5000)
    ]
    for found in ranks.run(save_with_faults, 2, tmp_path, mode, faults):
        assert all("checkpoint save failed" in alarm for _, alarm in found)
    assert {path.name for path in tmp_path.iterdir()} == {f"step-{2 * len(faults) + 1:08d}"}
    record_result(f"{mode}: {len(faults)} of {len(faults)} known at once; the next save succeeded")


def test_silent_short_write_is_detected(ranks: RankPool, tmp_path: Path) -> None:
    faults = [(rank, silent_short_write) for rank in (0, 1)]
    for found in ranks.run(save_with_faults, 2, tmp_path, "disabled", faults):
        assert all("checkpoint save failed" in alarm for _, alarm in found)


def test_close_fsyncs_the_whole_file(tmp_path: Path) -> None:
    sizes: list[int] = []
    with patch("checkpoint.tensor_files.os.fsync", lambda fd: sizes.append(os.fstat(fd).st_size)):
        file = HashedFile(tmp_path / "file")
        file.write(b"all of it")
        file.close()
    assert sizes == [9]


def test_hashed_file_never_overwrites(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        HashedFile(tmp_path / "file")


def test_shards_are_aligned_for_any_dtype(tmp_path: Path) -> None:
    tensors = {"odd": torch.ones(3, dtype=torch.bfloat16), "wide": torch.ones(2)}
    items = [item for name, t in tensors.items() for item in _create_write_items(name, t)]
    _, records = write_tensor_file(tmp_path / "file", items, lambda item: tensors[item.index.fqn])
    assert [s.file_offset % ALIGNMENT for r in records.values() for s in r.shards] == [0, 0]
