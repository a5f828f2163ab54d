"""Exit codes are an interface: launchers and schedulers decide from them."""

from dataclasses import dataclass
from pathlib import Path

from runtime.run_folder import write_whole

DONE = 0
FAILED = 1  # retry
BAD_CONFIG = 2
PREEMPTED = 75  # saved; requeue me
DO_NOT_REQUEUE = 93


@dataclass(frozen=True)
class Ending:
    """How a run ends."""

    reason: str
    """Why a run stopped before its last step; "" if it did not."""
    code: int
    hint: str = "the same command resumes"
    is_worth_saving: bool = True

    @property
    def outcome(self) -> str:
        """What ``control/outcome`` says."""
        return f"stopped {self.reason}" if self.reason else "done"


FINISHED = Ending("", DONE, "more --training.steps extend the run")
STOP_FILE = Ending("stop file", DONE)
_AGAIN = "not saved, and the same command would come here again"
NOT_FINITE = Ending("a loss or gradient that is not finite", DO_NOT_REQUEUE, _AGAIN, False)
SPIKES = Ending("too many spikes", DO_NOT_REQUEUE, _AGAIN, False)
DATA_ENDED = Ending("the end of the data", DONE, "[[data.sources]] with repeat = true begin again")
NOT_SAVED = Ending("checkpoints that could not be saved", FAILED, is_worth_saving=False)


def stopped_by(reason: str, *, has_checkpoints: bool) -> Ending:
    """The ending for the stop file, or a signal, whose sender wants the run to go on elsewhere."""
    if reason == STOP_FILE.reason:
        return STOP_FILE
    return Ending(reason, PREEMPTED if has_checkpoints else FAILED)


def report(control: Path, code: int) -> None:
    """Write the launcher's exit code to ``control/exit_code``, because schedulers flatten it.

    A start that was refused before there was a run leaves nothing behind.
    """
    if not control.exists():
        return
    write_whole(control / "exit_code", f"{code}\n")


def reported(control: Path) -> int | None:
    """The exit code of the last launcher; None if it has not ended, or was killed."""
    path = control / "exit_code"
    return int(path.read_text()) if path.exists() else None


def forget(control: Path) -> None:
    """Remove the last launcher's code: there is none until the new one ends."""
    (control / "exit_code").unlink(missing_ok=True)
