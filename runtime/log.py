"""Logger setup, printing of untrusted text, silenced library warnings, formats of numbers."""

import io
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from typing import TextIO

from config import ConfigError
from runtime.printable import printable, printable_lines

# ``extra`` of a record whose lines are to be kept, such as a sample of text.
OF_LINES = {"is_of_lines": True}
# First character of a line of stdout that is a record for the launcher: a record separator, as in
# RFC 7464.
RECORD_MARK = "\x1e"


class PrintableFormatter(logging.Formatter):
    """Formats every record as one printable line, or ``OF_LINES`` with all but the first indented.

    What a record quotes from a file can thus neither control a terminal nor look like a record.
    """

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if getattr(record, "is_of_lines", False):
            return printable_lines(text).replace("\n", "\n  ")
        return printable(text)


class RecordFormatter(logging.Formatter):
    """Formats every record as one line of JSON, from which the launcher makes the record again."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {"msg": super().format(record), "levelno": record.levelno}
        more = {name: getattr(record, name, None) for name in ("is_of_lines", "event")}
        fields |= {"created": record.created} | {k: v for k, v in more.items() if v is not None}
        return RECORD_MARK + json.dumps(fields)


def read_record(line: str) -> logging.LogRecord | None:
    """Make a record of a line of ``RecordFormatter``; None if it is another line, or torn."""
    if not line.startswith(RECORD_MARK):
        return None
    try:
        fields = json.loads(line.removeprefix(RECORD_MARK))
        kinds = [type(fields[name]) for name in ("msg", "levelno", "created")]
    # The user's own code may print JSON text sequences (RFC 7464).
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return logging.makeLogRecord(fields) if kinds == [str, int, float] else None


def init_logging() -> None:
    """Log to stdout: records for the launcher, which shows those of some ranks, or plain lines.

    Of torchrun's ranks, whose output is shown together, all but the first log warnings only.
    """
    escape_on_stdout()
    environment = os.environ
    is_launched = "LAUNCHER_PID" in environment
    is_shown = environment.get("RANK", "0") == "0" or "TORCHELASTIC_RUN_ID" not in environment
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(RecordFormatter() if is_launched else plain_formatter())
    logger = logging.getLogger("shardloom")
    logger.handlers = [handler]
    logger.setLevel(logging.DEBUG if is_launched else logging.INFO if is_shown else logging.WARNING)
    logger.propagate = False
    # True under tensor parallel, but harmless: no model mutates its activations.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def plain_formatter() -> PrintableFormatter:
    """Formatter of lines that start with date and time, as pipes and files get them."""
    return PrintableFormatter("%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S")


def show_phase(text: str, *, is_logged: bool = True) -> None:
    """Name what the start does next. The launcher shows it while it takes time.

    Without ``is_logged`` only a live line has it, and no pipe.
    """
    level = logging.INFO if is_logged else logging.DEBUG
    logger.log(level, "start: %s", text, extra={"event": {"phase": text}})


def show_progress(step: int, steps: int, activity: str = "") -> None:
    """Tell the launcher's live line the newest of ``steps``, and what is done besides training."""
    event = {"step": step, "steps": steps, "activity": activity}
    logger.debug("", extra={"event": event})


def has_colors(file: TextIO) -> bool:
    """True if ``file`` is a terminal that shows colors, and the user has not declined them."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "") in ("", "dumb", "unknown")
    return not is_plain and file.isatty()


def say(*lines: str, file: TextIO | None = None, is_error: bool = False) -> None:
    """Print each of ``lines`` as one printable line; with ``is_error`` in red, on stderr."""
    for line in lines:
        if is_error:
            print(red(printable(line)), file=sys.stderr)
        else:
            print(printable(line), file=file)


def escape_on_stdout() -> None:
    """Escape what the encoding of stdout lacks, as Python does on stderr, instead of raising."""
    # A notebook has a stream of its own.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


@contextmanager
def unless_closed(stream: TextIO) -> Iterator[None]:
    """Context that prints to stdout or stderr, if the ``stream`` still has a reader or terminal."""
    try:
        yield
        stream.flush()
    except OSError:
        discard(stream)


def discard(stream: TextIO) -> None:
    """Discard what is still to be written to ``stream``, because its reader or terminal is gone.

    Python writes it at exit, and would change the exit code if that fails.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def report(error: BaseException) -> None:
    """Print the message of ``error`` on stderr, or each message of a ``ConfigError``."""
    print(red(error_text(error)), file=sys.stderr)


def red(text: str) -> str:
    """``text`` for stderr: red if that is a terminal."""
    return f"\x1b[31m{text}\x1b[0m" if has_colors(sys.stderr) else text


def error_text(error: BaseException) -> str:
    """Printable message of ``error``; one line, or one per message of a ``ConfigError``."""
    messages = error.messages if isinstance(error, ConfigError) else [str(error)]
    return "\n".join(map(printable, messages))


def duration(seconds: float) -> str:
    """Format as 1:02:03. Negative seconds, from a clock that was set back, count as 0."""
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def plain_number(number: float, digits: int) -> str:
    """Format with ``digits`` digits, a large number with all before its point: 0.12, 1.2, 1,234."""
    rounded = f"{number:,.0f}"
    return rounded if len(rounded) >= digits else f"{Decimal(f'{number:.{digits}g}'):f}"


def short_number(number: float) -> str:
    """Format as 9,999, 41.2k, 3.5M, 12G or 1.2T."""
    units = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k"))
    scale, unit = next(((s, u) for s, u in units if abs(number) >= s), (1.0, ""))
    return f"{number / (1e3 if unit == 'k' else scale):,.4g}{unit}"


logger = logging.getLogger("shardloom")
