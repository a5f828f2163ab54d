"""Signals that ask a run to save and end."""

import signal
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
