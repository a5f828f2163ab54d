"""Exit codes, an interface: launchers and schedulers act on them."""

import math
from dataclasses import dataclass
from pathlib import Path

from runtime.filesystem import atomic_write_text
from runtime.run_folder import WriteAlarm, read_number, read_text, remove_file

DONE = 0
FAILED = 1  # retry
BAD_CONFIG = 2
CLOSED_PIPE = 141  # the reader of a tool's output is gone; what a shell gives for SIGPIPE
PREEMPTED = 75  # saved; requeue
DO_NOT_REQUEUE = 93


@dataclass(frozen=True)
class StopReason:
    """Reason why training stopped, and the exit code."""

    reason: str
    """Reason to stop before the last step; "" if training finished."""
    code: int
    hint: str = "run the same command to resume"
    is_worth_saving: bool = True

    @property
    def outcome(self) -> str:
        """Content of ``control/outcome``."""
        return f"stopped {self.reason}" if self.reason else "done"


FINISHED = StopReason("", DONE, "increase --training.steps to extend the run")
STOP_FILE = StopReason("stop file", DONE)
_NOT_RESUMABLE = "not saved, because the same command would stop here again"
NOT_FINITE = StopReason(
    "a loss or gradient that is not finite", DO_NOT_REQUEUE, _NOT_RESUMABLE, False
)
SPIKES = StopReason("too many spikes", DO_NOT_REQUEUE, _NOT_RESUMABLE, False)
DATA_ENDED = StopReason(
    "the end of the data",
    DONE,
    "one source goes on with repeat = true in [[data.sources]]; several need another job.name",
)
NOT_SAVED = StopReason("checkpoints that could not be saved", FAILED, is_worth_saving=False)
COMPLETE = (FINISHED, STOP_FILE, DATA_ENDED)
"""Reasons after which nobody has to start the run again."""
FAILURES = (NOT_FINITE, SPIKES, NOT_SAVED)
"""Reasons that somebody has to look into."""
ROLLED_BACK = "rolled back to step "
"""Begin of the reason that a rollback leaves in ``control/outcome``; the step follows."""


def last_step(control: Path) -> float:
    """Step that a rollback went back to and no start has resumed from yet; inf without one."""
    _, _, step = read_text(control / "outcome").partition(ROLLED_BACK)
    return int(step) if step.isdecimal() else math.inf


def stopped_by(reason: str, *, has_checkpoints: bool) -> StopReason:
    """Return the ``StopReason`` for the stop file, or for a signal, which asks to requeue."""
    if reason == STOP_FILE.reason:
        return STOP_FILE
    return StopReason(reason, PREEMPTED if has_checkpoints else FAILED)


def write_exit_code(control: Path, code: int) -> None:
    """Write ``control/exit_code``, because schedulers flatten the launcher's exit code.

    Does nothing without the folder: a start rejected before the run exists writes nothing.
    """
    path = control / "exit_code"
    if control.exists():
        with WriteAlarm().of(path):
            atomic_write_text(path, f"{code}\n")


def write_rejection(control: Path, reason: str) -> None:
    """Write why a start was rejected, for ``./shardloom status``, and its exit code.

    Does nothing without the folder.
    """
    path = control / "rejection"
    if control.exists():
        with WriteAlarm().of(path):
            atomic_write_text(path, f"{reason}\n")
    write_exit_code(control, BAD_CONFIG)


def read_rejection(control: Path) -> str:
    """Return the first line of why the last start was rejected; "" if it was not."""
    return read_text(control / "rejection")


def read_exit_code(control: Path) -> int | None:
    """Return the last launcher's exit code, None if it still runs or was killed."""
    return read_number(control / "exit_code")


def clear_exit_code(control: Path) -> None:
    """Delete the last launcher's exit code, so that there is none until the new one ends."""
    remove_file(control / "exit_code")
    remove_file(control / "rejection")
