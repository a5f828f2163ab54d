"""Protocol of trackers, and the facts of a run that they get. Imports no tracker."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

# For all trackers together, at the end of a run.
FINISH_SECONDS = 30.0


@dataclass(frozen=True)
class TrackedRun:
    """Facts of a run that a tracker gets when it starts."""

    id: str
    """Kept in the run's folder: a resumed run goes on under it."""
    name: str
    project: str
    folder: Path
    config: Mapping[str, Any]
    """Resolved configuration, as nested dicts."""
    resumed_step: int | None
    """Of the checkpoint loaded; later steps are repeated. None without one."""


class Tracker(Protocol):
    """Methods are called by one thread, in order. They may raise anything."""

    def start(self, run: TrackedRun) -> None: ...
    def log(self, step: int, values: Mapping[str, float]) -> None: ...
    def text(self, step: int, name: str, text: str) -> None: ...
    def finish(self) -> None: ...
