"""Exit codes are an interface: launchers and schedulers decide from them."""

DONE = 0
BAD_CONFIG = 2
PREEMPTED = 75  # saved; requeue me
DO_NOT_REQUEUE = 93
