"""A run on a terminal: a table of what was applied, the log, and a live line below it.

The cursor stays at the start of the live line, so that erasing to the end of the screen also
removes it where a terminal that became narrower has wrapped it.
"""

import io
import logging
import os
import re
import time
from collections import deque
from statistics import mean
from typing import Any

from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from launcher.console import write_all
from runtime.printable import printable, printable_lines

# The line first: tmux keeps what is erased from the first row on in its history.
ERASE = "\r\x1b[K\x1b[J"
# A row of the start's table: "component: what was applied".
ROW = re.compile(r"([A-Za-z][\w /+-]{1,20}): (.+)", re.DOTALL)
NAME_WIDTH = 21
DEFAULT_WIDTH, MIN_WIDTH, MAX_LIVE_WIDTH, MIN_BAR_WIDTH = 80, 20, 120, 10
# Logged losses whose older and newer halves give the trend.
TREND_LOSSES = 20
WARNING, ERROR, DIM = Style(color="yellow"), Style(color="red", bold=True), Style(dim=True)


class TerminalScreen:
    """Draws on the terminal ``descriptor``. A terminal of another size is noticed at each drawing.

    ``title``: of the run, above the table.
    """

    def __init__(self, title: str, descriptor: int = 1) -> None:
        self._descriptor, self._title = descriptor, title
        self._rich = Console(
            file=io.StringIO(), force_terminal=True, markup=False, highlight=False, emoji=False
        )
        self._state = LiveState()
        self._day = ""
        self._drawn = "", 0
        """The live line on the screen, "" if there is none, and the columns that it is for."""

    def show(self, records: list[logging.LogRecord]) -> None:
        self._rich.width = max(MIN_WIDTH, self._columns())
        with self._rich.capture() as capture:
            for record in records:
                self._print(record)
        if text := capture.get():
            self._write(text)

    def tick(self) -> None:
        self._write("")

    def clear(self) -> None:
        if self._drawn[0]:
            write_all(self._descriptor, ERASE)
            self._drawn = "", 0

    def _write(self, text: str) -> None:
        """Write ``text`` in place of the live line, and that line again below it."""
        new = self._live_line(), self._columns()
        if text or new != self._drawn:
            erase = ERASE if self._drawn[0] else ""
            write_all(self._descriptor, erase + text + new[0])
        self._drawn = new

    def _columns(self) -> int:
        try:
            # A serial line has 0.
            return os.get_terminal_size(self._descriptor).columns or DEFAULT_WIDTH
        except OSError:
            return DEFAULT_WIDTH

    def _print(self, record: logging.LogRecord) -> None:
        self._state.follow(record)
        if record.levelno == logging.DEBUG or "phase" in getattr(record, "event", {}):
            return
        self._print_day(record.created)
        if getattr(record, "is_raw", False):
            # A progress bar of a library begins its line again.
            shown = record.getMessage().rstrip("\r").rpartition("\r")[-1]
            style = DIM if getattr(record, "is_error", False) else Style()
            self._rich.print(Text(printable_lines(shown), style))
            return
        is_error, is_warning = (record.levelno >= n for n in (logging.ERROR, logging.WARNING))
        style = ERROR if is_error else WARNING if is_warning else Style()
        row = ROW.fullmatch(record.getMessage())
        if row and self._state.is_starting and record.levelno == logging.INFO:
            width = min(NAME_WIDTH, self._rich.width // 3)
            self._rich.print(columns(Text(row[1], "cyan"), Text(printable(row[2])), width))
            self._draw(getattr(record, "event", {}).get("drawing", []))
            return
        stamp = Text(time.strftime("%H:%M:%S", time.localtime(record.created)), DIM)
        self._rich.print(columns(stamp, self._text(record, style), 8))

    def _draw(self, lines: list[str]) -> None:
        """Print a drawing, if the terminal has the columns."""
        if max(map(len, lines), default=0) < self._rich.width:
            for line in lines:
                self._rich.print(Text(printable(line)), no_wrap=True)

    def _text(self, record: logging.LogRecord, style: Style) -> Text:
        metrics = getattr(record, "event", {}).get("metrics")
        if metrics is not None:
            fields = step_fields(metrics, self._state.steps)
            return Text(join_fitting(fields, self._rich.width - 10, spaces=(2,)))
        if getattr(record, "is_of_lines", False):
            return Text(printable_lines(record.getMessage()), style)
        return Text(printable(record.getMessage()), style)

    def _print_day(self, seconds: float) -> None:
        """Print the date above the first line of a day, and the title above the first of all."""
        day = time.strftime("%a %Y-%m-%d", time.localtime(seconds))
        if day != self._day:
            is_first, self._day = not self._day, day
            self._rich.rule(f"{self._title}  {day}" if is_first else day, style="dim", align="left")

    def _live_line(self) -> str:
        if not self._is_in_foreground():
            return ""
        width = min(self._columns() - 1, MAX_LIVE_WIDTH)
        self._rich.width = max(MIN_WIDTH, width)
        line = self._state.text(width, time.time())
        if not line.plain:
            return ""
        with self._rich.capture() as capture:
            self._rich.print(line, end="", overflow="crop", no_wrap=True)
        return capture.get() + "\r"

    def _is_in_foreground(self) -> bool:
        """False if the shell runs this process in the background and uses the last line itself."""
        try:
            return os.tcgetpgrp(self._descriptor) == os.getpgrp()
        except OSError:  # Not this process's own terminal.
            return True


class LiveState:
    """Contents of the live line, from the records so far."""

    def __init__(self) -> None:
        self.is_starting, self.steps = True, 0
        self._phase, self._since = "", time.time()
        self._step, self._activity, self._stepped = 0, "", 0.0
        self._metrics: dict[str, Any] = {}
        self._losses = deque[float](maxlen=TREND_LOSSES)
        self._n_alarms = {logging.WARNING: 0, logging.ERROR: 0}

    def follow(self, record: logging.LogRecord) -> None:
        """Take over what ``record`` tells about the run."""
        event = getattr(record, "event", {})
        if record.levelno in self._n_alarms:
            self._n_alarms[record.levelno] += 1
        if "phase" in event:
            self._phase, self._since = printable(event["phase"]), record.created
        if "step" in event:
            self.is_starting, self._phase = False, ""
            if event["step"] != self._step or not event["activity"]:
                self._stepped = record.created
            self._step, self.steps = event["step"], event["steps"]
            if event["activity"] != self._activity:
                self._activity, self._since = event["activity"], record.created
        if "metrics" in event:
            self._metrics = event["metrics"]
            self._losses.append(self._metrics["loss"])

    def text(self, width: int, now: float) -> Text:
        """Return the line for ``width`` columns: the fields that fit, the first ones first."""
        waited = f" {short_duration(now - self._since)}"
        if self.is_starting:
            return Text(self._phase and f"start: {self._phase}{waited}"[:width], "bold")
        head = f"step {self._step}/{self.steps}"
        fields = [self._activity + waited] if self._activity else []
        warnings, errors = self._n_alarms[logging.WARNING], self._n_alarms[logging.ERROR]
        fields += [f"{errors} alarm" + "s" * (errors > 1)] if errors else []
        fields += self._metric_fields(now) if self._metrics else []
        fields += [f"{warnings} warning" + "s" * (warnings > 1)] if warnings else []
        line = Text(join_fitting([head, *fields], width), "bold")
        bar_width = width - len(line) - 2
        if bar_width >= MIN_BAR_WIDTH:
            n_done = round(bar_width * min(1.0, self._step / max(1, self.steps)))
            line.append("  " + "━" * n_done, Style(color="green", bold=False))
            line.append("━" * (bar_width - n_done), DIM)
        if errors:
            line.highlight_regex(r"\d+ alarms?", ERROR)
        if warnings:
            line.highlight_regex(r"\d+ warnings?", WARNING)
        return line

    def _metric_fields(self, now: float) -> list[str]:
        return [
            f"loss {self._metrics['loss']:.3f}{self._trend()}",
            f"left {short_duration(self._seconds_left(now))}",
            *speed_fields(self._metrics),
        ]

    def _seconds_left(self, now: float) -> float:
        """Time of the steps that are left; a step counts down, but no further than its end."""
        logged = self._metrics["step"]
        each = self._metrics["seconds_left"] / max(1, self.steps - logged)
        since = 0.0 if self._activity else min(each, now - self._stepped)
        return each * (self.steps - max(self._step, logged)) - since

    def _trend(self) -> str:
        """Change of the mean loss from the older to the newer half of the last ones."""
        half = len(self._losses) // 2
        if half == 0:
            return ""
        losses = list(self._losses)
        change = mean(losses[-half:]) - mean(losses[:half])
        return f" {'↓' if change < 0 else '↑'}{abs(change):.3f}"


def step_fields(metrics: dict[str, Any], steps: int) -> list[str]:
    """Fields of a logged step, the most important ones first."""
    tokens, mfu, data = speed_fields(metrics)
    return [
        f"step {metrics['step']:>{len(str(steps))}}",
        f"loss {metrics['loss']:7.4f}",
        f"grad_norm {metrics['grad_norm']:7.4f}",
        f"lr {metrics['lr']:.2e}",
        tokens,
        mfu,
        f"memory {metrics['memory_gib']:.2f} GiB",
        data,
    ]


def speed_fields(metrics: dict[str, Any]) -> tuple[str, str, str]:
    """Tokens per second, MFU, and the share of time that waits for data."""
    rate, mfu = metrics["tokens_per_second"], metrics["mfu"]
    return (
        f"{rate:,.0f} tok/s" if rate < 1e6 else f"{rate / 1e6:.2f}M tok/s",
        "mfu n/a" if mfu is None else f"mfu {100 * mfu:.1f}%",
        f"data {100 * metrics['data_wait']:.0f}%",
    )


def short_duration(seconds: float) -> str:
    """Return 32s, 5m02s, 7h05m or 1d07h."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    if minutes == 0:
        return f"{rest}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"
    return f"{hours // 24}d{hours % 24:02}h"


def join_fitting(fields: list[str], width: int, spaces: tuple[int, ...] = (2, 1)) -> str:
    """Join as many of the first ``fields`` as fit into ``width``; the first of equal ``spaces``."""
    best = 0, ""
    for space in spaces:
        n_fields = len(fields)
        while n_fields > 1 and len((" " * space).join(fields[:n_fields])) > width:
            n_fields -= 1
        if n_fields > best[0]:
            best = n_fields, (" " * space).join(fields[:n_fields])
    return best[1][:width]


def columns(name: Text, text: Text, width: int) -> Table:
    """Row of two columns; a long ``text`` continues below itself."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=width, no_wrap=True, overflow="crop")
    grid.add_column(overflow="fold")
    grid.add_row(name, text)
    return grid
