"""Logger setup, printing of untrusted text, silenced library warnings, and duration formatting."""

import logging
import os
import sys
import warnings
from typing import TextIO

from config import ConfigError
from runtime.printable import printable, printable_lines

# ``extra`` of a record whose lines are to be kept, such as a sample of text.
OF_LINES = {"is_of_lines": True}


class PrintableFormatter(logging.Formatter):
    """Formats every record as one printable line, or ``OF_LINES`` with all but the first indented.

    What a record quotes from a file can thus neither control a terminal nor look like a record.
    """

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if getattr(record, "is_of_lines", False):
            return printable_lines(text).replace("\n", "\n  ")
        return printable(text)


def init_logging() -> None:
    """Log to stdout on every rank; the launcher selects the ranks that are shown."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(PrintableFormatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    logger = logging.getLogger("shardloom")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    # True under tensor parallel, but harmless: no model mutates its activations.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    # Harmless: each trace is exported at the end of its cycle.
    warnings.filterwarnings("ignore", message="Warning: Profiler clears events")


def say(*lines: str, file: TextIO | None = None) -> None:
    """Print each of ``lines`` as one printable line, by default to stdout."""
    for line in lines:
        print(printable(line), file=file)


def discard_stdout() -> None:
    """Discard what is still to be written to stdout, because its reader or terminal is gone.

    Python writes it at exit, and would change the exit code if that fails.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def report(error: BaseException) -> None:
    """Print the message of ``error`` on stderr, or each message of a ``ConfigError``."""
    print(error_text(error), file=sys.stderr)


def error_text(error: BaseException) -> str:
    """Printable message of ``error``; one line, or one per message of a ``ConfigError``."""
    messages = error.messages if isinstance(error, ConfigError) else [str(error)]
    return "\n".join(map(printable, messages))


def duration(seconds: float) -> str:
    """Format as 1:02:03. Negative seconds, from a clock that was set back, count as 0."""
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


logger = logging.getLogger("shardloom")
