"""State of processes, and the seconds until a condition holds."""

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from runtime.machine import available_cpus


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def are_gone(processes: Iterable[int]) -> bool:
    return not any(is_running(process) for process in processes)


def seconds_until(condition: Callable[[], bool], *, limit: float, after: float = 0.0) -> float:
    """Wait for ``condition``; return the seconds beyond ``after``. Fails after ``limit`` seconds.

    The limit is scaled by the load of the machine.
    """
    scaled_limit = after + limit * max(1.0, os.getloadavg()[0] / available_cpus())
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < scaled_limit, f"not within {scaled_limit:.1f} s"
        time.sleep(0.01)
    return time.monotonic() - begin - after
