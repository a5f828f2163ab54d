"""Trackers of a run beside ``metrics.jsonl``: TensorBoard, Weights & Biases, MLflow, trackio.

Each has a thread and a bounded queue, so that a tracker that fails, hangs or waits for a network
delays no step and ends no run: that is an alarm, and what it did not take is counted.
"""

import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from metrics.alarms import AlarmHandler
from metrics.tensorboard_tracker import TensorBoardTracker
from metrics.tracker import FINISH_SECONDS, TrackedRun, Tracker
from runtime.commands import install_text
from runtime.compat import is_installed
from runtime.filesystem import atomic_write_text
from runtime.log import logger
from runtime.printable import error_line
from runtime.run_folder import WriteAlarm, read_text

MAX_QUEUED = 10_000
# A tracker that is busy with one record for so long does not answer.
HANG_SECONDS = 60.0
ID_FILE = "run_id"


class Trackers:
    """Passes records on to all trackers of a run, and its warnings and alarms too."""

    def __init__(self, trackers: Mapping[str, Callable[[], Tracker]], run: TrackedRun) -> None:
        """``trackers``: by name; called in the tracker's thread, because imports are slow."""
        self._threads = [TrackerThread(name, build, run) for name, build in trackers.items()]
        self._step = run.resumed_step or 0
        self._handler = AlarmHandler(lambda kind, text: self.text(f"{kind}s", text))

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        """Add a point to the curve of each value that is not None. Never waits."""
        known = {name: value for name, value in values.items() if value is not None}
        for thread in self._threads:
            thread.put("log", step, known)

    def end_step(self, step: int) -> None:
        """Count texts that follow to ``step``, the newest one that is done."""
        self._step = step

    def text(self, name: str, text: str) -> None:
        """Add a text at the newest step. Never waits."""
        for thread in self._threads:
            thread.put("text", self._step, name, text)

    def finish(self) -> None:
        """Wait until the trackers wrote what they have, at most for ``FINISH_SECONDS``."""
        self._handler.close()
        deadline = time.monotonic() + FINISH_SECONDS
        for thread in self._threads:
            thread.close()
        for thread in self._threads:
            thread.join(deadline)


class TrackerThread:
    """A tracker, and the thread that alone calls it."""

    def __init__(self, name: str, build: Callable[[], Tracker], run: TrackedRun) -> None:
        self._name, self._build, self._run = name, build, run
        self._queue = queue.Queue[tuple[Any, ...]](MAX_QUEUED)
        self._n_missing, self._failed, self._is_hanging = 0, False, False
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._work, daemon=True, name=f"tracker {name}")
        self._thread.start()

    def put(self, *call: Any) -> None:
        """Queue a call of a method: its name and arguments. Never waits."""
        if not self._thread.is_alive():
            self._n_missing += 1
            return
        try:
            self._queue.put_nowait(call)
        except queue.Full:
            self._n_missing += 1
        since = self._busy_since
        if since is not None and time.monotonic() - since > HANG_SECONDS and not self._is_hanging:
            self._is_hanging = True
            text = "ALARM: %s does not answer since %.0f s; the run goes on, records wait"
            logger.error(text, self._name, HANG_SECONDS)

    def close(self) -> None:
        """Ask the thread to finish after what is queued."""
        try:
            self._queue.put_nowait(("finish",))
        except queue.Full:
            self._n_missing += 1

    def join(self, deadline: float) -> None:
        """Wait for the end until ``deadline``, and report what is missing."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._n_missing += self._queue.qsize()
            text = "ALARM: %s did not finish within %.0f s"
            logger.error(text, self._name, FINISH_SECONDS)
        if self._n_missing:
            text = "%s: %d records are missing"
            logger.warning(text, self._name, self._n_missing)

    def _work(self) -> None:
        self._busy_since = time.monotonic()
        try:
            tracker = self._build()
            tracker.start(self._run)
        except Exception as error:  # A library of others, which may raise anything.
            text = "ALARM: %s did not start, and takes nothing until the next start: %s"
            logger.error(text, self._name, error_line(error))
            self._n_missing += self._queue.qsize()
            return
        method = ""
        while method != "finish":
            self._busy_since = None
            method, *arguments = self._queue.get()
            self._busy_since, self._is_hanging = time.monotonic(), False
            try:
                getattr(tracker, method)(*arguments)
            except Exception as error:
                self._n_missing += 1
                if not self._failed:
                    text = "ALARM: %s did not take a record; the run goes on: %s"
                    logger.error(text, self._name, error_line(error))
                self._failed = True
            else:
                self._failed = False


def check_installed(names: Sequence[str]) -> None:
    """Raise ``ValueError``, with the command that helps, if a tracker's package is missing."""
    for name in names:
        if not is_installed(name):
            raise ValueError(f"metrics.trackers: {name} is not installed: {install_text(name)}")


def tracker_classes(names: Sequence[str]) -> dict[str, Callable[[], Tracker]]:
    """Return what constructs ``metrics.trackers``, by name. Imports no optional package."""
    known: dict[str, Callable[[], Tracker]] = {
        "tensorboard": TensorBoardTracker,
        "wandb": _wandb,
        "mlflow": _mlflow,
        "trackio": _trackio,
    }
    return {name: known[name] for name in names}


# Each module imports its package, which is optional and slow to import.
def _wandb() -> Tracker:
    from metrics.wandb_tracker import WandbTracker

    return WandbTracker()


def _mlflow() -> Tracker:
    from metrics.mlflow_tracker import MlflowTracker

    return MlflowTracker()


def _trackio() -> Tracker:
    from metrics.trackio_tracker import TrackioTracker

    return TrackioTracker()


def run_id(folder: Path) -> str:
    """Id of the run in ``folder``, made at its first start. A failure to keep it is an alarm."""
    path = folder / ID_FILE
    found = read_text(path)
    if found.isalnum() and found.isascii() and len(found) <= 64:
        return found
    new = uuid.uuid4().hex[:12]
    with WriteAlarm().of(path):
        atomic_write_text(path, new + "\n")
    return new
