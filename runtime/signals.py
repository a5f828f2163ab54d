"""Signals that ask a run to save and end, and one that ends a process with its parent."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

# Sent by users, by a terminal that closes, and by schedulers, some of which send SIGXCPU or SIGALRM
# at a time limit. By default each of them ends a process at once.
_NAMES = (
    "SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGXCPU", "SIGALRM", "SIGPWR",
)  # fmt: skip
# macOS has no SIGPWR.
SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))


def handle_signals(
    handler: Callable[[int, FrameType | None], object] | signal.Handlers,
) -> None:
    """Set the handler of ``SIGNALS``. SIGHUP stays ignored if it is, as by ``nohup``."""
    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when process ``parent`` ends. Linux only.

    Raises ``OSError`` if ``prctl`` fails.
    """
    if sys.platform != "linux":
        return
    PR_SET_PDEATHSIG = 1
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    # The parent may have ended before this call.
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)
