"""Who holds a run's lock, and that finding out keeps no run from starting."""

import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime import run_lock
from runtime.run_lock import LOCKS, is_held_here, is_locked, lock_run
from tests.lib.patience import wait_until


@pytest.mark.parametrize(
    ("device", "process", "inode", "is_held"),
    [(0, "1", 0, True), (1, "4711", 0, True), (1, "1", 0, False), (0, "4711", 1, False)],
)
def test_lock_matches_inode_and_device_or_holder(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: int,
    process: str,
    inode: int,
    is_held: bool,
) -> None:
    """Some file systems list another device in /proc/locks than stat returns."""
    lock = tmp_path / "lock"
    lock.write_text("4711 on elsewhere\n")
    stat = lock.stat()
    where = f"{os.major(stat.st_dev) + device:02x}:{os.minor(stat.st_dev):02x}"
    line = f"1: FLOCK  ADVISORY  WRITE {process} {where}:{stat.st_ino + inode} 0 EOF\n"
    (tmp_path / "locks").write_text(line)
    monkeypatch.setattr(run_lock, "LOCKS", tmp_path / "locks")
    assert is_held_here(lock) == is_held
    (tmp_path / "locks").write_text(line.replace("1: ", "1: -> "))
    assert not is_held_here(lock), "a waiter holds no lock"


@pytest.mark.skipif(not LOCKS.exists(), reason="needs Linux")
def test_looking_does_not_block_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shared(lock: Path) -> bool:
        """Take a shared lock, which looks harmless."""
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            time.sleep(1e-4)
            return False

    lock_run(tmp_path).close()
    assert not is_held_here(tmp_path / "lock")
    with lock_run(tmp_path):
        assert is_held_here(tmp_path / "lock")
    # A start waits a moment for those who take the lock.
    monkeypatch.setattr(run_lock, "WAIT_SECONDS", 0.0)
    assert failed_starts_beside(is_held_here, tmp_path) == 0
    # On a busy machine the other thread may not have run meanwhile.
    wait_until(lambda: failed_starts_beside(shared, tmp_path) > 0)
    monkeypatch.undo()
    assert failed_starts_beside(lambda lock: is_locked(lock.parent), tmp_path) == 0


def failed_starts_beside(check: Callable[[Path], bool], control: Path) -> int:
    """Number of starts of a run, out of 500, that fail while ``check`` polls the lock."""
    is_over = threading.Event()

    def poll() -> None:
        while not is_over.is_set():
            try:
                check(control / "lock")
            except BlockingIOError:
                continue

    thread = threading.Thread(target=poll)
    thread.start()
    failed = 0
    for _ in range(500):
        try:
            lock_run(control).close()
        except ValueError:
            failed += 1
    is_over.set()
    thread.join()
    return failed


def test_folder_that_cannot_be_locked_is_unknown(tmp_path: Path) -> None:
    assert is_locked(tmp_path / "missing")
    assert not is_locked(tmp_path / "missing", if_unknown=False)
    with lock_run(tmp_path):
        assert is_locked(tmp_path, if_unknown=False)
