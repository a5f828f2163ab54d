"""Exit codes are an interface: launchers and schedulers decide from them."""

from dataclasses import dataclass

DONE = 0
FAILED = 1  # retry
BAD_CONFIG = 2
PREEMPTED = 75  # saved; requeue me
DO_NOT_REQUEUE = 93


@dataclass(frozen=True)
class Ending:
    """Why a run ends before its last step."""

    reason: str
    code: int
    hint: str = "the same command resumes"
    is_saved: bool = True
    """Whether what it has is worth saving."""


_AGAIN = "not saved, and the same command would come here again"
NOT_FINITE = Ending("a loss or gradient that is not finite", DO_NOT_REQUEUE, _AGAIN, False)
SPIKES = Ending("too many spikes", DO_NOT_REQUEUE, _AGAIN, False)
DATA_ENDED = Ending("the end of the data", DONE, "[[data.sources]] with repeat = true begin again")
NOT_SAVED = Ending("checkpoints that could not be saved", FAILED, is_saved=False)
