"""Limits of what a test may take: time and memory."""

import faulthandler
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SECONDS = 30


class Hang(BaseException):
    """No ``Exception``, which what hangs could handle: ``TimeoutError`` is an ``OSError``."""


@contextmanager
def time_limit(seconds: float = SECONDS) -> Iterator[None]:
    """Raise ``Hang`` after that time; end the process if even that is not heard."""

    def ring(*_: object) -> None:
        raise Hang(f"no answer in {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(2 * seconds, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def limited_memory() -> Iterator[None]:
    """Limit what this process maps to 4 GiB more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + (4 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
