"""The run's ``control/`` folder and signals: how the outside asks a run to stop, and what it says.

``torchrun`` and ``srun`` flatten exit codes, so the state that launchers need is in files:
``outcome`` (done, or stopped and why; absent means failure), ``progress`` (newest checkpoint's
step), ``stop`` (anyone may write it: save at the next step and end) and ``failures``.
"""

import fcntl
import os
import signal
import socket
import time
from pathlib import Path
from types import FrameType
from typing import TextIO

import torch
import torch.distributed as dist

from config import ConfigError
from runtime.exit_codes import STOP_FILE
from runtime.run_folder import make_folder, write_whole
from runtime.together import on_first

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
# Slurm's scancel may reach a rank twice, once through the launcher. Later signals insist: end now.
INSIST_SECONDS = 3.0


class RunControl:
    """Collects requests to stop. Make it before the process group: signals may come early."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._is_writer = folder, False
        self._signal: signal.Signals | None = None
        self._received = 0.0
        self.stop: str | None = None
        """Why the run is to end, if it is: a signal's name or the stop file."""
        for number in SIGNALS:
            signal.signal(number, self._receive)

    def hold(self) -> None:
        """Let rank 0 hold the folder until it ends, for it alone writes there. A collective.

        Raises ``ConfigError`` on every rank if another run has the folder, or it cannot be made:
        ranks that only lost the one that was refused would end first, as failed.
        """
        self._is_writer = dist.get_rank() == 0
        if mistake := on_first(self._take_folder):
            # A group whose ranks still connect to each other fails where one of them has gone.
            dist.barrier()
            raise ConfigError([mistake])

    def _take_folder(self) -> str:
        """Why it cannot be had; "" if it can."""
        try:
            make_folder(self._folder)
            self._lock = lock_run(self._folder)
        except ConfigError as error:
            return str(error)
        except OSError as error:
            return f"job.output_dir: {error}"
        return ""

    def forget(self) -> None:
        """Forget the last attempt's outcome and its request to stop, now that this one goes on."""
        if self._is_writer:
            for name in ("outcome", "stop"):
                (self._folder / name).unlink(missing_ok=True)

    def end(self, outcome: str) -> None:
        """Report the outcome; from here on, signals change nothing any more."""
        self.report("outcome", outcome)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def agree(self, **counts: int) -> dict[str, int]:
        """The sums over all ranks of ``counts``: what ranks tell each other at each step.

        The same reduction, on the CPU, carries the requests to stop: ``stop`` is equal on all ranks
        after it. A collective.
        """
        requests = {number.name: int(number == self._signal) for number in SIGNALS}
        has_file = self._is_writer and (self._folder / "stop").exists()
        mine = {**counts, **requests, STOP_FILE.reason: int(has_file)}
        sums = torch.tensor(list(mine.values()))
        dist.all_reduce(sums)
        agreed = dict(zip(mine, sums.tolist(), strict=True))
        reasons = [name for name in (*requests, STOP_FILE.reason) if agreed[name]]
        self.stop = self.stop or next(iter(reasons), None)
        return {name: agreed[name] for name in counts}

    def report(self, name: str, text: str) -> None:
        """Write ``control/<name>``."""
        if self._is_writer:
            write_whole(self._folder / name, text + "\n")

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._signal is not None and now - self._received > INSIST_SECONDS:
            os._exit(128 + number)
        if self._signal is None:
            self._signal, self._received = signal.Signals(number), now


def lock_run(folder: Path) -> TextIO:
    """Hold the ``control/`` folder until the file returned is closed.

    Raises ``ConfigError`` that says who holds it, if somebody does.
    """
    file = (folder / "lock").open("a+")
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


def is_held(folder: Path) -> bool:
    """Whether a run has the ``control/`` folder now; its lock is taken for a moment to find out."""
    try:
        lock_run(folder).close()
    except ConfigError:
        return True
    return False
