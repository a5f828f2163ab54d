"""Hooks that programs call before and after their imports, and where their ranks import from."""

import atexit
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from runtime.printable import format_traceback
from runtime.release import add_release_note

ROOT = Path(__file__).absolute().parents[1]


# Seconds of imports after which a pipe learns of them too; a terminal does at once.
SLOW_SECONDS = 2.0


def begin_imports(*, announcement: str = "") -> Callable[[int], NoReturn]:
    """Disable gc, and add the PyTorch release to uncaught errors, import errors included.

    ``announcement``: line that says what takes time; of the process that owns the terminal.
    Returns ``sys.exit`` that does not free what is imported.
    """
    codes: list[int] = []
    # Of functions registered with atexit, the first runs last.
    atexit.register(_exit_at_once, codes)

    def leave(code: int) -> NoReturn:
        codes.append(code)
        sys.exit(code)

    # Objects of imports are never freed, and collecting among them takes a sixth of import time.
    gc.disable()
    report = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, Exception):
            add_release_note(error)
            print(format_traceback(error), end="", file=sys.stderr)
        else:
            report(kind, error, trace)

    sys.excepthook = hook
    if announcement:
        _announce(announcement)
    return leave


def end_imports(*, was_announced: bool = False) -> None:
    """Enable gc, and exclude the objects of imports from it. ``was_announced``: erase that line."""
    gc.freeze()
    gc.enable()
    # Python collects once more at exit, and extension modules warn about objects left over.
    atexit.register(gc.unfreeze)
    if was_announced and _is_terminal():
        print("\r\x1b[K", end="", flush=True)


def _exit_at_once(codes: list[int]) -> None:
    """Exit with the only one of ``codes``: to free what was imported takes 0.7 s of CPU time."""
    if not codes:
        return
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return  # Python says so.
    os._exit(codes[0])


def _announce(text: str) -> None:
    """Print ``text``: on a terminal until the end of imports, elsewhere if they are slow."""
    if _is_terminal():
        print(text, end="\r", flush=True)
        return

    def print_if_slow() -> None:
        if not gc.isenabled():  # the imports have not ended
            print(time.strftime("%Y-%m-%d %H:%M:%S"), text, flush=True)

    timer = threading.Timer(SLOW_SECONDS, print_if_slow)
    timer.daemon = True
    timer.start()


def _is_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def import_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables with which Python imports Shardloom, but nothing of the current folder."""
    # An empty entry stands for the current folder.
    entries = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    path = os.pathsep.join(dict.fromkeys([str(ROOT), *entries]))
    return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
