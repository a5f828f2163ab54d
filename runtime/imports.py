"""Hooks that programs call before and after their imports, and where their ranks import from."""

import atexit
import gc
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from runtime.printable import format_traceback
from runtime.release import add_release_note

ROOT = Path(__file__).absolute().parents[1]


def begin_imports() -> None:
    """Disable gc, and add the PyTorch release to uncaught errors, import errors included."""
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


def end_imports() -> None:
    """Enable gc, and exclude the objects of imports from it."""
    gc.freeze()
    gc.enable()
    # Python collects once more at exit, and extension modules warn about objects left over.
    atexit.register(gc.unfreeze)


def import_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables with which Python imports Shardloom, but nothing of the current folder."""
    # An empty entry stands for the current folder.
    entries = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    path = os.pathsep.join(dict.fromkeys([str(ROOT), *entries]))
    return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
