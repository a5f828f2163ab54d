"""Exit codes are an interface: launchers and schedulers decide from them."""

DONE = 0
FAILED = 1  # retry
BAD_CONFIG = 2
PREEMPTED = 75  # saved; requeue me
DO_NOT_REQUEUE = 93
