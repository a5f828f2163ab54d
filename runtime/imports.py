"""What a program does around its imports, which are most of its start."""

import atexit
import gc
import sys
from types import TracebackType

from runtime.release import name_release


def begin_imports() -> None:
    """Let errors that end this process name PyTorch's release, those of imports too."""
    # What imports allocate lives on: searching it for garbage takes a sixth of their time.
    gc.disable()
    report = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, Exception):
            name_release(error)
        report(kind, error, trace)

    sys.excepthook = hook


def end_imports() -> None:
    gc.freeze()
    gc.enable()
    # Python looks for garbage once more when it ends, and libraries complain of what it left.
    atexit.register(gc.unfreeze)
