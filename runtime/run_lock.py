"""The lock of a run's ``control/`` folder: one process writes there. Imports no torch."""

import fcntl
import os
import socket
import time
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

from config import ConfigError
from runtime.filesystem import check_run_folder, open_file
from runtime.run_folder import WriteAlarm, read_text

LOCKS = Path("/proc/locks")
# Characters of the lock file that are read to name its holder.
MAX_HOLDER = 300
# Much longer than ``is_locked`` holds it.
WAIT_SECONDS = 0.5


def lock_run(folder: Path) -> TextIO:
    """Lock the ``control/`` folder until the returned file is closed.

    Raises ``ConfigError`` that names the process that holds it, or a link in the run's folder.
    """
    try:
        check_run_folder(folder.parent)
        file = TextIOWrapper(open_file(folder / "lock", "ab+"), errors="replace")
    except OSError as error:
        raise ConfigError([f"job.output_dir: {error}"]) from None
    try:
        _lock(file)
    except BlockingIOError:
        file.seek(0)
        holder = file.read(MAX_HOLDER).strip()
        file.close()
        raise already_locked(holder, folder) from None
    except OSError as error:
        file.close()
        raise ConfigError([f"job.output_dir: {lock_error_text(folder / 'lock', error)}"]) from None
    # The lock holds even if a full disk has no room for the name of its holder.
    with WriteAlarm().of(folder / "lock"):
        os.ftruncate(file.fileno(), 0)
        os.write(file.fileno(), f"{lock_holder()}\n".encode())
    return file


def lock_error_text(path: Path, error: OSError) -> str:
    """Text of an ``error`` of locking ``path``."""
    needs = "its file system must support flock (Lustre: mount option flock)"
    return f"{path} cannot be locked: {error.strerror}; {needs}"


def already_locked(holder: str, folder: Path) -> ConfigError:
    """The error that another process has locked the ``control/`` folder."""
    return ConfigError([f"job.name: process {holder} is writing to {folder.parent} now"])


def _lock(file: TextIO) -> None:
    """Raises ``BlockingIOError`` if a process holds the lock longer than for a moment."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.01)


def lock_holder() -> str:
    """Name of this process in the lock file."""
    return f"{os.getpid()} on {socket.gethostname()}"


def is_locked(folder: Path, *, if_unknown: bool = True) -> bool:
    """True if a run has locked the ``control/`` folder; ``if_unknown`` if it cannot be locked.

    Takes the lock for a moment to find out, for which ``lock_run`` waits.
    """
    try:
        with open_file(folder / "lock", "ab+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return if_unknown
    return False


def is_held_here(lock: Path) -> bool:
    """True if a process of this machine holds ``lock``, read from /proc/locks.

    Taking the lock, even for a moment, could keep a run from starting.
    """
    if not (LOCKS.exists() and lock.exists()):
        return False
    status = lock.stat()
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    process = read_text(lock).partition(" ")[0]
    for line in LOCKS.read_text().splitlines():
        # 1: FLOCK  ADVISORY  WRITE 4711 fe:00:2408689 0 EOF; "->" marks a waiter.
        fields = line.split()
        if fields[1:4] == ["FLOCK", "ADVISORY", "WRITE"]:
            where, _, inode = fields[5].rpartition(":")
            # On some file systems stat returns another device than the one listed here.
            if inode == str(status.st_ino) and (where == device or fields[4] == process):
                return True
    return False
