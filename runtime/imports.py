"""Hooks that a program calls before and after its imports, which dominate startup time."""

import atexit
import gc
import sys
from types import TracebackType

from runtime.release import add_release_note


def begin_imports() -> None:
    """Disable gc, and add the PyTorch release to uncaught errors, import errors included."""
    # Objects of imports are never freed, and collecting among them takes a sixth of import time.
    gc.disable()
    report = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, Exception):
            add_release_note(error)
        report(kind, error, trace)

    sys.excepthook = hook


def end_imports() -> None:
    """Enable gc, and exclude the objects of imports from it."""
    gc.freeze()
    gc.enable()
    # Python collects once more at exit, and extension modules warn about objects left over.
    atexit.register(gc.unfreeze)
