"""A failed save is reported at once, harms no older checkpoint and does not stop training."""

import errno
import os
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
from checkpoint.hashed_file import HashedFile
from checkpoint.tensor_files import ALIGNMENT, lay_out, write_tensor_file
from runtime.log import logger
from tests.lib.durability import file_size_limit
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
    with patch("checkpoint.hashed_file.os.fsync", lambda fd: sizes.append(os.fstat(fd).st_size)):
        file = HashedFile(tmp_path / "file")
        file.write(b"all of it")
        file.close()
    assert sizes == [9]


def test_hashed_file_never_overwrites(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        HashedFile(tmp_path / "file")


def test_shards_are_aligned_for_any_dtype() -> None:
    tensors = {"odd": torch.ones(3, dtype=torch.bfloat16), "wide": torch.ones(2)}
    items = [item for name, t in tensors.items() for item in _create_write_items(name, t)]
    records = lay_out("file", items).records
    assert [s.file_offset % ALIGNMENT for r in records.values() for s in r.shards] == [0, 0]


@pytest.mark.parametrize("nth", [1, 2])
def test_failed_write_leaves_no_open_file(tmp_path: Path, nth: int) -> None:
    items = _create_write_items("weight", torch.ones(1000))
    before = len(os.listdir("/proc/self/fd"))
    with failing_write(nth, errno.EIO), pytest.raises(OSError, match="planted") as caught:
        write_tensor_file(tmp_path / "file", items, lambda item: torch.ones(1000))
    # The traceback holds no file either.
    assert len(os.listdir("/proc/self/fd")) == before, caught


def save_with_a_broken_state(folder: Path, broken: str, mode: str) -> list[tuple[str, int]]:
    """Save with a state that only rank 1 cannot read; then without the fault."""
    run = Run(folder, TWO, async_mode=mode)
    found = []
    for step in (1, 3):
        states = {"tensors": run.model_state, "json": run.values}
        error = RuntimeError("planted") if dist.get_rank() == 1 else None
        fault = (
            patch.object(states[broken], "state_dict", side_effect=error)
            if error
            else nullcontext()
        )
        with patch.object(logger, "error") as alarm, fault:
            run.save(step)
        found.append((str(alarm.call_args), run.checkpointer.newest_step))
        run.save(step + 1)
        found.append(("", run.checkpointer.newest_step))
    run.checkpointer.close()
    return found


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("broken", ["tensors", "json"])
def test_state_that_one_rank_cannot_read_fails_the_save_on_all(
    ranks: RankPool, tmp_path: Path, broken: str, mode: str
) -> None:
    for found in ranks.run(save_with_a_broken_state, 2, tmp_path, broken, mode):
        assert [step for _, step in found] == [0, 2, 2, 4]
        assert all("rank 1: RuntimeError: planted" in text for text, _ in found[::2])
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000002", "step-00000004"}


def save_to_a_folder_that_was_taken(folder: Path) -> list[str]:
    """Save twice; before the second commit another process has taken the folder."""
    run = Run(folder, TWO)
    run.save(1)
    taken = patch.object(run.checkpointer, "_before_commit", side_effect=OSError("taken"))
    with taken, patch.object(logger, "error") as alarm:
        run.save(2)
    run.checkpointer.close()
    return [str(alarm.call_args), *sorted(path.name for path in folder.iterdir())]


def test_nothing_is_published_in_a_folder_that_was_taken(ranks: RankPool, tmp_path: Path) -> None:
    alarm, *found = ranks.run(save_to_a_folder_that_was_taken, 2, tmp_path)[0]
    assert "taken" in alarm
    assert found == ["step-00000001"]
