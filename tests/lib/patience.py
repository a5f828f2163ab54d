"""Waiting for what must happen, as long as the slowest machine may need for it."""

import time
from collections.abc import Callable

PATIENCE_SECONDS = 600
"""Only a test that fails waits that long. Beside other work, a rank on slow cores takes minutes to
start. That something happens soon is tested by ``tests/lib/processes.py``."""


def wait_until(condition: Callable[[], object], *, poll_seconds: float = 0.1) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_SECONDS} seconds"
        time.sleep(poll_seconds)
