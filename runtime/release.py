"""PyTorch release in use, compared with the tested releases."""

import re
from importlib.metadata import version

from runtime.log import logger

RELEASES = ("2.11.0", "2.13.0", "2.14.1", "2.15.0")
"""Tested releases. The first is the oldest supported one."""


def add_release_note(error: BaseException) -> None:
    """Add the PyTorch release to the traceback of ``error``. Mutates ``error``."""
    if torch_release() not in getattr(error, "__notes__", ()):
        error.add_note(torch_release())


def torch_release() -> str:
    """Return the installed PyTorch release and the tested ones, for messages."""
    return f"torch {version('torch')}; tested with {RELEASES[0]} to {RELEASES[-1]}"


def warn_if_untested() -> None:
    """Log a warning if this release is newer than all tested ones."""
    if is_untested():
        logger.warning("PyTorch is newer than the releases that were tested: %s", torch_release())


def is_untested() -> bool:
    """True if this release is newer than all tested ones."""
    return _numbers(version("torch")) > _numbers(RELEASES[-1])


def _numbers(text: str) -> tuple[int, ...]:
    """Parse 2.15.0a0+git to (2, 15, 0)."""
    return tuple(map(int, re.findall(r"\d+", text)[:3]))
