r"""Text from files, names and arguments in a form that is safe to print.

A terminal obeys control characters, a line break forges a line of a log, and bidi controls reorder
what is read. All are printed escaped, as ``repr`` does: ``\x1b``, ``\n``, ``\u202e``.
"""

import re
import traceback

# Control characters except tabs and line breaks, other line breaks, bidi controls, surrogates.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Escape all that is not printable, line breaks included."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def printable_lines(text: str) -> str:
    """Escape a text of several lines: tabs, line breaks and invisible characters are kept."""
    return _UNSAFE.sub(lambda match: repr(match[0])[1:-1], text)


def first_line(text: str) -> str:
    """First line of ``text`` that is not blank; "" if there is none."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def reason_of(error: Exception) -> str:
    """Text of ``error``; of an ``OSError`` without its number and file, which the caller names."""
    return getattr(error, "strerror", None) or str(error)


def error_line(error: BaseException) -> str:
    """Type and first line of ``error``, and of the causes that its text does not quote."""
    lines = [f"{type(each).__name__}: {first_line(str(each))}" for each in with_causes(error)]
    return ": ".join(line.rstrip(": ") for line in lines)


def with_causes(error: BaseException) -> list[BaseException]:
    """Return ``error`` and what it was raised from, up to a cause that its text quotes.

    PyTorch's pipelines raise an error that says only which stage failed.
    """
    errors = [error]
    while (cause := errors[-1].__cause__) is not None:
        if first_line(str(cause)) in str(errors[-1]):
            break
        errors.append(cause)
    return errors


def format_traceback(error: BaseException) -> str:
    """Format a traceback; lines after the first are indented, so that none looks like a log's."""
    text = printable_lines("".join(traceback.format_exception(error)).rstrip("\n"))
    return text.replace("\n", "\n  ") + "\n"
