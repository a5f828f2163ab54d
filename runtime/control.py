"""Stop requests (signals, the stop file) and the run's ``control/`` folder.

``torchrun`` and ``srun`` flatten exit codes, so the state that launchers need is in files:
``outcome`` (done, or stopped and why; absent means failure), ``progress`` (newest checkpoint's
step), ``failures``, and what anyone may write: ``stop`` (save at the next step and end), ``trace``
and ``snapshot`` (profile the next steps).
"""

import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import TextIO

import torch
import torch.distributed as dist

from config import ConfigError
from runtime.exit_codes import STOP_FILE, clear_exit_code
from runtime.filesystem import atomic_write_text, make_folder
from runtime.log import logger
from runtime.object_collectives import run_on_rank0
from runtime.run_folder import (
    OLD_STOP,
    WriteAlarm,
    is_file_at,
    read_text,
    remove_file,
    remove_stop_file,
    stop_file_id,
)
from runtime.run_lock import already_locked, lock_holder, lock_run
from runtime.signals import SIGNALS, handle_signals

# Slurm's scancel may reach a rank twice, once through the launcher. A later signal ends at once.
FORCE_EXIT_AFTER_SECONDS = 3.0
LOST_LOCK = "lost lock"
# Files that anyone may write: profile the next steps, or write a memory snapshot of them.
TRACE, SNAPSHOT = "trace", "snapshot"


class StopRequested(Exception):
    """Work other than a step ends, because the run shall stop."""


class RunControl:
    """Collects stop requests. Create it before the process group, so that no signal is lost."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._is_writer, self._alarm = folder, False, WriteAlarm()
        self._old_stop = os.environ.get(OLD_STOP, stop_file_id(folder))
        self._signal: signal.Signals | None = None
        self._received = 0.0
        self.stop: str | None = None
        """Reason to stop: a signal's name or the stop file; None to go on."""
        self._wanted: frozenset[str] = frozenset()
        """``TRACE`` and ``SNAPSHOT`` files found by the last all-reduce, which removes them."""
        self._former_locks: list[TextIO] = []
        handle_signals(self._receive)

    def acquire_lock(self) -> None:
        """Lock the folder for rank 0, which alone writes there, and delete an old stop. Collective.

        Raises ``ConfigError`` on every rank if another run holds the lock, or the folder cannot be
        made: ranks that only lost their peer would end first, as failed.
        """
        self._is_writer = dist.get_rank() == 0
        if mistake := run_on_rank0(self._lock_folder):
            # Ranks that still connect to each other would fail if one of them had gone.
            dist.barrier()
            raise ConfigError([mistake])
        if self._is_writer:
            # A start that was rejected before this one locked the run may have written its end.
            clear_exit_code(self._folder)
            remove_stop_file(self._folder, self._old_stop)

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

    def check_lock(self) -> None:
        """On rank 0: raise ``OSError`` or ``ConfigError`` if another process locked the run."""
        if mistake := self._keep_lock():
            raise OSError(mistake)
        # Where locks do not hold between nodes, it has put its name into the same file.
        holder = read_text(self._folder / "lock")
        if holder not in ("", lock_holder()):
            raise already_locked(holder, self._folder)

    def _keep_lock(self) -> str:
        """Make and lock ``control/`` again if it was removed; return why that is impossible."""
        path = self._folder / "lock"
        # Some file systems renumber files, so the holder's name counts too.
        if is_file_at(self._lock.fileno(), path) or read_text(path) == lock_holder():
            return ""
        output_dir = self._folder.parent.parent
        if not output_dir.is_dir():
            # Perhaps unmounted: what is made here would hide below the mount point.
            return f"job.output_dir: {output_dir} was removed while the run trains"
        # A folder that was renamed stays locked under its new name.
        self._former_locks.append(self._lock)
        if not (mistake := self._lock_folder()):
            text = (
                "ALARM: %s was removed or renamed while the run trains; it is made and locked again"
            )
            logger.error(text, self._folder)
        return mistake

    def clear_previous_outcome(self) -> None:
        """Delete the ``outcome`` that the previous attempt left."""
        if self._is_writer:
            remove_file(self._folder / "outcome")

    def end(self, outcome: str) -> None:
        """Report the outcome. Signals are ignored from here on."""
        self.report("outcome", outcome)
        handle_signals(signal.SIG_IGN)

    def all_reduce_counts(self, **counts: int) -> dict[str, int]:
        """Return the sums over all ranks; update ``stop`` and what is wanted. Collective.

        One all-reduce carries the counts and the stop requests, so ``stop`` is equal on all ranks.
        Raises ``ConfigError`` on all ranks if another process has locked the run meanwhile.
        """
        requests = {number.name: int(number == self._signal) for number in SIGNALS}
        # Also a folder or a broken link: whoever made it asked the run to stop.
        has_file = self._is_writer and os.path.lexists(self._folder / "stop")
        mistake = self._keep_lock() if self._is_writer else ""
        profiles = {
            name: int(self._is_writer and os.path.lexists(self._folder / name))
            for name in (TRACE, SNAPSHOT)
        }
        own = {
            **counts,
            **requests,
            STOP_FILE.reason: int(has_file),
            LOST_LOCK: int(bool(mistake)),
            **profiles,
        }
        sums = torch.tensor(list(own.values()))
        dist.all_reduce(sums)
        total = dict(zip(own, sums.tolist(), strict=True))
        if total[LOST_LOCK]:
            raise ConfigError(
                [mistake or f"job.name: rank 0 lost the lock of {self._folder.parent}"]
            )
        reasons = [name for name in (*requests, STOP_FILE.reason) if total[name]]
        self.stop = self.stop or next(iter(reasons), None)
        found = frozenset(name for name in profiles if total[name])
        self._wanted |= found
        for name in found if self._is_writer else ():
            remove_file(self._folder / name)
        return {name: total[name] for name in counts}

    def raise_if_stopped(self) -> None:
        """Raise ``StopRequested`` on all ranks if one of them was asked to stop. Collective."""
        self.all_reduce_counts()
        if self.stop is not None:
            raise StopRequested

    def take_wanted(self) -> frozenset[str]:
        """Return the profiles that were asked for since the last call, equal on all ranks.

        Validation, too, sums counts: what it finds is for the step after it.
        """
        wanted, self._wanted = self._wanted, frozenset()
        return wanted

    def report(self, name: str, text: str) -> None:
        """Write ``control/<name>``; a failure is an alarm."""
        path = self._folder / name
        if self._is_writer:
            with self._alarm.of(path):
                atomic_write_text(path, text + "\n")

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._signal is not None and now - self._received > FORCE_EXIT_AFTER_SECONDS:
            os._exit(128 + number)
        if self._signal is None:
            self._signal, self._received = signal.Signals(number), now
