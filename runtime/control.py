"""Stop requests (signals, the stop file) and the run's ``control/`` folder.

``torchrun`` and ``srun`` flatten exit codes, so the state that launchers need is in files:
``outcome`` (done, or stopped and why; absent means failure), ``progress`` (newest checkpoint's
step), ``stop`` (anyone may write it: save at the next step and end) and ``failures``.
"""

import fcntl
import os
import signal
import socket
import time
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import TextIO

import torch
import torch.distributed as dist

from config import ConfigError
from runtime.exit_codes import STOP_FILE
from runtime.filesystem import (
    atomic_write_text,
    check_run_folder,
    make_folder,
    open_file,
)
from runtime.object_collectives import run_on_rank0
from runtime.signals import SIGNALS, handle_signals

# Slurm's scancel may reach a rank twice, once through the launcher. A later signal ends at once.
FORCE_EXIT_AFTER_SECONDS = 3.0


class RunControl:
    """Collects stop requests. Create it before the process group, so that no signal is lost."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._is_writer = folder, False
        self._signal: signal.Signals | None = None
        self._received = 0.0
        self.stop: str | None = None
        """Reason to stop: a signal's name or the stop file; None to go on."""
        handle_signals(self._receive)

    def acquire_lock(self) -> None:
        """Lock the folder for rank 0, which alone writes there. Collective.

        Raises ``ConfigError`` on every rank if another run holds the lock, or the folder cannot be
        made: ranks that only lost their peer would end first, as failed.
        """
        self._is_writer = dist.get_rank() == 0
        if mistake := run_on_rank0(self._lock_folder):
            # Ranks that still connect to each other would fail if one of them had gone.
            dist.barrier()
            raise ConfigError([mistake])

    def _lock_folder(self) -> str:
        """Return why the folder cannot be locked; "" on success."""
        try:
            make_folder(self._folder)
            self._lock = lock_run(self._folder)
        except ConfigError as error:
            return str(error)
        except OSError as error:
            return f"job.output_dir: {error}"
        return ""

    def clear_previous_outcome(self) -> None:
        """Delete the ``outcome`` and ``stop`` files that the previous attempt left."""
        if self._is_writer:
            for name in ("outcome", "stop"):
                (self._folder / name).unlink(missing_ok=True)

    def end(self, outcome: str) -> None:
        """Report the outcome. Signals are ignored from here on."""
        self.report("outcome", outcome)
        handle_signals(signal.SIG_IGN)

    def all_reduce_counts(self, **counts: int) -> dict[str, int]:
        """Return the sums of ``counts`` over all ranks; update ``stop``. Collective, on the CPU.

        One all-reduce carries the counts and the stop requests, so ``stop`` is equal on all ranks.
        """
        requests = {number.name: int(number == self._signal) for number in SIGNALS}
        has_file = self._is_writer and (self._folder / "stop").exists()
        own = {**counts, **requests, STOP_FILE.reason: int(has_file)}
        sums = torch.tensor(list(own.values()))
        dist.all_reduce(sums)
        total = dict(zip(own, sums.tolist(), strict=True))
        reasons = [name for name in (*requests, STOP_FILE.reason) if total[name]]
        self.stop = self.stop or next(iter(reasons), None)
        return {name: total[name] for name in counts}

    def report(self, name: str, text: str) -> None:
        """Write ``control/<name>``."""
        if self._is_writer:
            atomic_write_text(self._folder / name, text + "\n")

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._signal is not None and now - self._received > FORCE_EXIT_AFTER_SECONDS:
            os._exit(128 + number)
        if self._signal is None:
            self._signal, self._received = signal.Signals(number), now


def lock_run(folder: Path) -> TextIO:
    """Lock the ``control/`` folder until the returned file is closed.

    Raises ``ConfigError`` that names the process that holds it, or a link in the run's folder.
    """
    try:
        check_run_folder(folder.parent)
        file = TextIOWrapper(open_file(folder / "lock", "ab+"))
    except OSError as error:
        raise ConfigError([f"job.output_dir: {error}"]) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        who = f"process {file.read().strip()} is writing to {folder.parent} now"
        raise ConfigError([f"job.name: {who}"]) from None
    file.truncate(0)
    file.write(f"{os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def is_locked(folder: Path) -> bool:
    """True if a run has locked the ``control/`` folder; takes the lock for a moment to find out."""
    try:
        lock_run(folder).close()
    except ConfigError:
        return True
    return False
