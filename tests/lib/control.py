"""Run control in a test's process."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime.control import RunControl
from runtime.signals import SIGNALS


@contextmanager
def control_of(folder: Path) -> Iterator[RunControl]:
    """Control of the run in ``folder``; signal handlers are restored on exit."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        control = RunControl(folder)
        control.acquire_lock()
        yield control
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
