"""Real runs whose folder is damaged, fills up, or is removed while they train."""

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from checkpoint.checkpointer import Checkpointer
from launcher.failures import newest_saved_step
from runtime.control import RunControl
from runtime.log import logger
from runtime.run_folder import step_of
from tests.lib.damage import damage
from tests.lib.forked import checkpoints, codes, log, run, started
from tests.lib.launch import records
from tools.check_ledger import replay
from tools.status import read_status

KEYS = {
    "checkpoint.interval": "2",
    "training.steps": "4",
    "training.global_batch_size": "4",
    "metrics.log_freq": "1",
    "metrics.enable_ledger": "true",
}
FILES = (
    *("metrics.jsonl", "alarms.jsonl", "config.toml", "run_id", "tensorboard", "logs", "traces"),
    "ledger/rank-00000.jsonl",
    *(
        f"control/{name}"
        for name in ("failures", "progress", "outcome", "exit_code", "rejection", "stop")
    ),
)


@pytest.mark.row(37, "Nothing but a checkpoint stops a run from starting")
def test_run_starts_whatever_its_other_files_are(
    tmp_path: Path, record_result: Callable[[str], None]
) -> None:
    folder, kinds = tmp_path / "debug_model", ("binary", "folder", "fifo")
    run(tmp_path, 1, **KEYS)
    for number, kind in enumerate(kinds, start=1):
        for name in FILES:
            damage(folder / name, kind)
        status = read_status(folder, 0.0)
        assert status.problems, kind
        run(tmp_path, 1, **KEYS | {"training.steps": str(4 + 2 * number)})
        assert step_of(checkpoints(tmp_path)[0]) == 4 + 2 * number
        assert [line["step"] for line in records(tmp_path)] == [3 + 2 * number, 4 + 2 * number]
        assert read_status(folder, 0.0).state == "done"
        assert replay(folder).violations, "the ledger before the damage is gone"
    assert len(list(folder.glob("corrupt-metrics.jsonl-*"))) == len(kinds)
    count = len(kinds) * len(FILES)
    record_result(f"{count} damaged files in {len(kinds)} starts: each resumed; bad metrics kept")


def fill_disk_after_first_save(folder: Path, alarms: Path) -> None:
    """Leave no room for anything but checkpoints, from the first commit to the next save."""
    is_full = False
    report, begin = RunControl.report, Checkpointer.begin
    fsync = os.fsync

    def fsync_if_room(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if is_full and path.startswith(str(folder)) and "checkpoints" not in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        fsync(descriptor)

    def full(self: RunControl, name: str, text: str) -> None:
        nonlocal is_full
        is_full = True
        report(self, name, text)

    def room_again(self: Checkpointer, step: int) -> None:
        nonlocal is_full
        is_full = False
        begin(self, step)

    logger.addHandler(logging.FileHandler(alarms))
    patch.object(RunControl, "report", full).start()
    patch.object(Checkpointer, "begin", room_again).start()
    patch("os.fsync", fsync_if_room).start()


@pytest.mark.row(38, "A full disk ends no run")
def test_disk_is_full_after_a_checkpoint(
    tmp_path: Path, record_result: Callable[[str], None]
) -> None:
    folder, alarms = tmp_path / "debug_model", tmp_path / "alarms"
    plant = partial(fill_disk_after_first_save, folder, alarms)
    with started(tmp_path, 1, plant=plant, **KEYS) as processes:
        assert codes(processes) == {0}, log(tmp_path)
    logged = [line for line in alarms.read_text().splitlines() if "ALARM" in line]
    assert any("control/progress was not written" in line for line in logged)
    assert [step_of(path) for path in checkpoints(tmp_path)] == [4, 2]
    assert newest_saved_step(folder / "control") == 4
    record_result(f"{len(logged)} alarms, 2 checkpoints, exit code 0")


def remove_after_first_save(folder: Path, name: str, alarms: Path) -> None:
    """Remove or rename a folder of the run in the step after the first checkpoint."""
    count = RunControl.all_reduce_counts
    steps = 0

    def remove(self: RunControl, **counts: int) -> dict[str, int]:
        nonlocal steps
        steps += 1
        if steps == 4:
            (folder / name).rename(folder.with_name("renamed"))
        return count(self, **counts)

    logger.addHandler(logging.FileHandler(alarms))
    patch.object(RunControl, "all_reduce_counts", remove).start()


@pytest.mark.row(39, "A folder of the run that is removed or renamed is made again")
@pytest.mark.parametrize("name", ["", "checkpoints", "control", "ledger"])
def test_removed_folder_is_logged_and_made_again(
    tmp_path: Path, name: str, record_result: Callable[[str], None]
) -> None:
    folder, alarms = tmp_path / "debug_model", tmp_path / "alarms"
    plant = partial(remove_after_first_save, folder, name, alarms)
    with started(tmp_path, 1, plant=plant, **KEYS) as processes:
        assert codes(processes) == {0}, log(tmp_path)
    logged = [line for line in alarms.read_text().splitlines() if "ALARM" in line]
    assert any("was removed" in line for line in logged), logged
    # What the next start needs is there.
    assert step_of(checkpoints(tmp_path)[0]) == 4
    assert read_status(folder, 0.0).problems == []
    assert read_status(folder, 0.0).state == "done"
    if name in ("", "ledger"):
        assert replay(folder).violations
    shutil.rmtree(tmp_path / "renamed")
    assert json.loads((folder / "control" / "progress").read_text()) == 4
    record_result(f"{name or 'the run folder'}: logged, saved again, exit code 0")
