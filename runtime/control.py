"""The run's ``control/`` folder and signals: how the outside asks a run to stop, and what it says.

``torchrun`` and ``srun`` flatten exit codes, so the state that launchers need is in files:
``outcome`` (done, or stopped and why; absent means failure), ``progress`` (newest checkpoint's
step) and ``stop`` (anyone may write it: save at the next step and end).
"""

import fcntl
import os
import signal
import time
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from config import ConfigError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# A terminal's Ctrl-C reaches a rank twice, once by way of torchrun. Later ones mean it.
INSIST_SECONDS = 3.0


class RunControl:
    """Collects requests to stop. Install it before the process group: signals may come early."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._signal: signal.Signals | None = None
        self._received = 0.0
        for number in SIGNALS:
            signal.signal(number, self._receive)

    def begin(self, is_writer: bool) -> None:
        """Forget the last attempt's outcome and its request to stop.

        Raises ``ConfigError`` if another run has the folder, until that one ends.
        """
        self._is_writer = is_writer
        if is_writer:
            # What a run writes is its owner's alone.
            try:
                self._folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._folder.mkdir(mode=0o700, exist_ok=True)
                self._lock = (self._folder / "lock").open("w")
            except OSError as error:
                raise ConfigError([f"job.output_dir: {error}"]) from None
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                folder = self._folder.parent
                raise ConfigError([f"job.name: a run is writing to {folder} now"]) from None
            for name in ("outcome", "stop"):
                (self._folder / name).unlink(missing_ok=True)

    def agreed_stop(self) -> str | None:
        """The reason to stop after this step, the same on all ranks. A collective, on the CPU."""
        code = int(self._signal or 0)
        if self._is_writer and (self._folder / "stop").exists():
            code = code or -1
        codes = torch.tensor([code, -code])
        dist.all_reduce(codes, op=dist.ReduceOp.MAX)
        if codes[0] > 0:
            return signal.Signals(int(codes[0])).name
        return "stop file" if codes[1] > 0 else None

    def report(self, name: str, text: str) -> None:
        """Write ``control/<name>`` as a whole: readers see the old text or the new."""
        if self._is_writer:
            scratch = self._folder / f".{name}"
            scratch.write_text(text + "\n")
            os.replace(scratch, self._folder / name)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._signal is not None and now - self._received > INSIST_SECONDS:
            os._exit(128 + number)
        if self._signal is None:
            self._signal, self._received = signal.Signals(number), now
