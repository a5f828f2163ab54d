"""Which PyTorch this is, beside those that the tests were run on."""

import re
from importlib.metadata import version

RELEASES = ("2.11.0", "2.13.0", "2.14.1", "2.15.0")
"""Those that the tests were run on, the first of them the oldest that is supported."""


def name_release(error: BaseException) -> None:
    """Have the traceback of ``error`` end with the release."""
    if about_torch() not in getattr(error, "__notes__", ()):
        error.add_note(about_torch())


def about_torch() -> str:
    return f"torch {version('torch')}; tests were run on {RELEASES[0]} to {RELEASES[-1]}"


def is_untested() -> bool:
    """Whether this release came after the newest that the tests were run on."""
    return _numbers(version("torch")) > _numbers(RELEASES[-1])


def _numbers(text: str) -> tuple[int, ...]:
    """2.15.0a0+git to (2, 15, 0)."""
    return tuple(map(int, re.findall(r"\d+", text)[:3]))
