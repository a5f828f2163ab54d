"""The console on a pseudo-terminal, whose screen pyte renders."""

import fcntl
import logging
import os
import pty
import struct
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.console import Console, PlainScreen, is_terminal
from launcher.rank_output import RankOutput
from launcher.screen import LiveState, TerminalScreen, join_fitting, short_duration
from runtime.log import RecordFormatter, has_colors
from tests.lib.patience import wait_until
from tests.lib.processes import seconds_until

pyte = pytest.importorskip("pyte")

METRICS = {
    "step": 150_000,
    "loss": 2.1344,
    "grad_norm": 0.345,
    "lr": 2.49e-3,
    "tokens_per_second": 1_285_586.0,
    "mfu": 0.412,
    "memory_gib": 61.2,
    "data_wait": 0.001,
    "seconds_left": 111_735.0,
}
DAY = time.mktime((2026, 11, 25, 23, 59, 58, 0, 0, -1))


def record(text: str = "", level: int = logging.INFO, **attributes: Any) -> logging.LogRecord:
    fields = {"msg": text, "levelno": level, "created": DAY} | attributes
    return logging.makeLogRecord(fields)


def step(number: int, activity: str = "") -> logging.LogRecord:
    event = {"step": number, "steps": 1_000_000, "activity": activity}
    return record(level=logging.DEBUG, event=event)


def metrics(**changes: Any) -> logging.LogRecord:
    return record("step ...", event={"metrics": METRICS | changes})


class Terminal:
    """A pseudo-terminal, and what its user sees."""

    def __init__(self, columns: int, rows: int = 30) -> None:
        self.master, self.slave = pty.openpty()
        os.set_blocking(self.master, False)
        self.screen = pyte.Screen(columns, rows)
        self.stream = pyte.ByteStream(self.screen)
        self.resize(columns, rows)

    def resize(self, columns: int, rows: int = 30) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen.resize(rows, columns)

    def lines(self) -> list[str]:
        """Lines up to the last one that is not empty."""
        try:
            while data := os.read(self.master, 1 << 16):
                self.stream.feed(data)
        except OSError:  # Nothing more for now, or the other end is closed.
            pass
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip().split("\n")

    def color_of(self, text: str) -> str:
        (row,) = (i for i, line in enumerate(self.lines()) if text in line)
        column = self.screen.display[row].index(text)
        return self.screen.buffer[row][column].fg


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    for name in ("NO_COLOR", "COLUMNS", "LINES", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    found = Terminal(80)
    yield found
    os.close(found.master)
    os.close(found.slave)


def test_table_log_and_live_line_fit_80_columns(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = TerminalScreen("books", terminal.slave)
    screen.show([record("start: finding the data", event={"phase": "finding the data"})])
    screen.tick()
    assert terminal.lines()[-1].startswith("start: finding the data")
    rows = [record(f"mesh: {'dp_shard 2, ' * 9}end"), record("precision: compute bfloat16")]
    screen.show(rows)
    monkeypatch.setattr("launcher.screen.time.time", lambda: DAY)
    logged = [metrics(), step(150_000), metrics(loss=2.1244), step(150_003)]
    screen.show([step(0), *logged])
    screen.tick()
    title, *_, live = lines = terminal.lines()
    assert title.startswith("books  Wed 2026-11-25 ─")
    assert lines[1].startswith("mesh                  dp_shard 2, dp_shard 2")
    # A long value goes on below itself.
    assert lines[2].startswith(" " * 22 + "2, dp_shard 2")
    assert lines[-4].startswith("precision             compute bfloat16")
    assert lines[-3:-1] == [
        "23:59:58 step  150000  loss  2.1344  grad_norm  0.3450  lr 2.49e-03",
        "23:59:58 step  150000  loss  2.1244  grad_norm  0.3450  lr 2.49e-03",
    ]
    fields = "step 150003/1000000 loss 2.124 ↓0.010 left 1d07h 1.29M tok/s mfu 41.2% data 0%"
    assert live == fields
    assert sum("150003/1000000" in line for line in lines) == 1


@pytest.mark.parametrize(("columns", "is_drawn"), [(80, True), (79, False), (20, False)])
def test_a_drawing_is_shown_where_it_fits(terminal: Terminal, columns: int, is_drawn: bool) -> None:
    terminal.resize(columns)
    drawing = ["lr 1 │" + "█" * 73, "step   1"]
    plan = record("learning rate: 1", event={"drawing": drawing})
    TerminalScreen("books", terminal.slave).show([plan, record("mesh: one rank")])
    lines = terminal.lines()
    assert [line for line in lines if line in drawing] == drawing * is_drawn
    assert any(line.startswith("mesh") for line in lines)


def test_a_pipe_gets_no_drawing(capfd: pytest.CaptureFixture[str]) -> None:
    PlainScreen().show([record("learning rate: 1", event={"drawing": ["█"]})])
    assert capfd.readouterr().out.endswith(" learning rate: 1\n")


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 100, 120, 200])
def test_live_line_has_one_row_at_any_width(columns: int, terminal: Terminal) -> None:
    terminal.resize(columns)
    screen = TerminalScreen("books", terminal.slave)
    screen.show([step(3)])
    for number in range(4, 50):
        screen.show([step(number), metrics(step=number, loss=number / 7)])
        screen.tick()
        lines = terminal.lines()  # A terminal that is not read is full after 4 KiB.
    assert [line.startswith("step 49") for line in lines].count(True) == 1
    assert lines[-1].startswith("step 49/1000000"[:columns])


def test_resized_terminal_keeps_one_live_line(terminal: Terminal) -> None:
    screen = TerminalScreen("books", terminal.slave)
    screen.show([step(3), metrics(step=3)])
    for columns in (120, 50, 100, 30, 80):
        terminal.lines()
        terminal.resize(columns)
        screen.tick()
        lines = terminal.lines()
        assert sum(line.startswith("step 3/") for line in lines) == 1
        # Another log line goes above it, and the bar fills what is left.
        assert len(lines[-1]) < columns
    screen.clear()
    assert not any(line.startswith("step 3/") for line in terminal.lines())
    assert terminal.screen.cursor.x == 0


@pytest.mark.parametrize("no_color", ["", "1"])
def test_warnings_are_yellow_and_alarms_red(
    no_color: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    screen = TerminalScreen("books", terminal.slave)
    screen.show([record("lr peaks at 60 %", logging.WARNING), record("ALARM: full", logging.ERROR)])
    screen.show([step(1), record("an ordinary line")])
    screen.tick()
    colors = [terminal.color_of(text) for text in ("lr peaks", "ALARM", "an ordinary")]
    assert colors == (["default"] * 3 if no_color else ["brown", "red", "default"])
    # They scroll away, so the live line counts them.
    assert "1 alarm" in terminal.lines()[-1]
    assert "1 warning" in terminal.lines()[-1]


def test_date_is_shown_when_it_changes(terminal: Terminal) -> None:
    screen = TerminalScreen("books", terminal.slave)
    screen.show([step(1), record("before")])
    screen.show([record("after", created=DAY + 3.0)])
    before, rule, after, _ = terminal.lines()[1:]
    assert before == "23:59:58 before"
    assert rule.startswith("Thu 2026-11-26 ─")
    assert after == "00:00:01 after"


def test_output_of_programs_cannot_control_the_terminal(terminal: Terminal) -> None:
    screen = TerminalScreen("books", terminal.slave)
    screen.show([step(1), record("a\x1b[2Jb", is_raw=True), record("c\x1b]0;d\x07e\nf")])
    assert terminal.lines()[1:-1] == ["a\\x1b[2Jb", "23:59:58 c\\x1b]0;d\\x07e\\nf"]
    # Of a progress bar, its last state.
    screen.show([record("10%\r50%\r100%\r", is_raw=True, is_error=True)])
    assert terminal.lines()[-2] == "100%"


@pytest.mark.parametrize("term", ["dumb", "unknown", ""])
def test_dumb_terminal_gets_plain_lines(
    term: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_terminal(terminal.slave)
    with os.fdopen(os.dup(terminal.slave), "w") as file:
        assert has_colors(file)
        monkeypatch.setenv("TERM", term)
        assert not has_colors(file)
    assert not is_terminal(terminal.slave)


def test_plain_lines_have_dates_and_slow_phases(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = PlainScreen()
    slow, quick = (record(f"start: {n}", event={"phase": n}) for n in ("slow", "quick"))
    screen.show([quick, slow])
    screen.tick()
    monkeypatch.setattr("launcher.console.SLOW_PHASE_SECONDS", 0.0)
    screen.tick()
    screen.show([step(1), record("model: llama3"), record("raw \x1b", is_raw=True)])
    screen.show([record("a warning of a library", is_raw=True, is_error=True)])
    out, err = capfd.readouterr()
    stamp = "2026-11-25 23:59:58"
    assert out == f"{stamp} start: slow\n{stamp} model: llama3\nraw \x1b\n"
    assert err == "a warning of a library\n"
    # Of another node: its ranks have gone on, and the head shows with what.
    hidden = record("start: of another", logging.DEBUG, event={"phase": "of another"})
    screen.show([slow, hidden])
    screen.tick()
    assert capfd.readouterr().out == ""


class HeldScreen:
    """A terminal after Ctrl-S."""

    def __init__(self) -> None:
        self.is_free, self.shown = threading.Event(), list[str]()

    def show(self, records: list[logging.LogRecord]) -> None:
        self.is_free.wait()
        self.shown += [found.getMessage() for found in records]

    def tick(self) -> None: ...

    def clear(self) -> None: ...


def test_held_terminal_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.console.MAX_RECORDS", 100)
    screen = HeldScreen()
    with Console(screen) as console:
        console.show(record("first"))
        seconds_until(lambda: not console._records, limit=5.0)
        for number in range(1000):
            console.show(record(str(number)))
        screen.is_free.set()
    first, note, *rest = screen.shown
    assert first == "first"
    assert note.startswith("console: 900 records are not shown")
    assert rest == [str(number) for number in range(900, 1000)]


def test_lost_terminal_is_no_error(terminal: Terminal) -> None:
    class Lost(HeldScreen):
        def show(self, records: list[logging.LogRecord]) -> None:
            raise BrokenPipeError

    with Console(Lost()) as console:
        for number in range(10):
            console.show(record(str(number)))
        wait_until(lambda: not console._records)
        assert console._thread.is_alive()


class Shown:
    """Stands for a console."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.levels: dict[str, int] = {}

    def show(self, found: logging.LogRecord) -> None:
        self.texts.append(found.getMessage())
        self.levels[found.getMessage()] = found.levelno


def test_text_without_a_line_end_is_told_from_the_record_behind_it(tmp_path: Path) -> None:
    console = Shown()
    output = RankOutput(console, tmp_path, followed=0, shows_warnings=True)
    pipes = [output.open(rank, is_error=False, is_shown=rank == 0) for rank in (0, 1)]
    for descriptor, text in zip(pipes, ("first", "second"), strict=True):
        line = RecordFormatter().format(record(f"ALARM: {text}", logging.ERROR))
        os.write(descriptor, f".\x1e.{line}\n".encode())
    output.start()
    for descriptor in pipes:
        os.close(descriptor)
    output.finish()
    assert console.texts == [".\x1e.", "ALARM: first", "rank 1: ALARM: second"]
    assert "ALARM: second\n" in (tmp_path / "rank-1.out").read_text()


@pytest.mark.parametrize("is_head", [True, False])
def test_output_of_ranks_is_kept_and_shown(is_head: bool, tmp_path: Path) -> None:
    console = Shown()
    output = RankOutput(console, tmp_path, followed=0, shows_warnings=is_head)
    as_line = RecordFormatter().format
    phase = as_line(record("start: data", event={"phase": "data"}))
    texts = [
        [phase, as_line(record("both", logging.WARNING)), "printed", as_line(step(7))],
        [as_line(record("both", logging.WARNING)), as_line(record("disk", logging.ERROR)),
         as_line(record("slow", logging.WARNING)), as_line(record("info"))],
        # It rejects its configuration, so it leaves no log.
        [phase],
    ]  # fmt: skip
    noise = "USDT:2026-11-26 04:03:00 9689:9689 SyncActivityProfilerHandler.cpp:52] profiler_start"
    pipes = {
        (rank, is_error): output.open(rank, is_error=is_error, is_shown=is_head and rank == 0)
        for rank in range(len(texts))
        for is_error in (False, True)
    }
    for rank, lines in enumerate(texts):
        os.write(pipes[rank, False], "".join(f"{line}\n" for line in lines).encode())
    os.write(pipes[0, True], f"{noise}\nUserWarning: x\n".encode())
    # A torn record of a killed rank.
    os.write(pipes[1, False], as_line(record("torn"))[:20].encode())
    output.start()
    for descriptor in pipes.values():
        os.close(descriptor)
    output.finish()
    shown = sorted(console.texts)
    if is_head:
        want = ["", "UserWarning: x", "both", "printed", "rank 1: disk", "rank 1: slow"]
        want.append("start: data")
    else:
        # The live line follows its start and steps.
        want = ["", "rank 1: disk", "start: data"]
    assert shown == want
    assert console.levels["start: data"] == (logging.INFO if is_head else logging.DEBUG)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["rank-0.err", "rank-0.out", "rank-1.out"]
    assert (tmp_path / "rank-0.err").read_text() == f"{noise}\nUserWarning: x\n"
    kept = (tmp_path / "rank-0.out").read_text().replace("2026-11-25 23:59:58 ", "").splitlines()
    assert kept == ["start: data", "both", "printed"]
    kept = (tmp_path / "rank-1.out").read_text().splitlines()
    assert [line.removeprefix("2026-11-25 23:59:58 ") for line in kept[:4]] == [
        "both", "disk", "slow", "info"
    ]  # fmt: skip
    assert kept[4].startswith("\\x1e{")


def test_prompt_without_line_end_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.rank_output.PARTIAL_SECONDS", 0.0)
    console = Shown()
    output = RankOutput(console, None, followed=0, shows_warnings=True)
    pipe = output.open(0, is_error=False, is_shown=True)
    output.start()
    os.write(pipe, b"(Pdb) ")
    seconds_until(lambda: console.texts == ["(Pdb) "], limit=5.0)
    # A child of the rank that holds the pipe open does not delay the end.
    output.finish()
    os.close(pipe)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0s"), (32, "32s"), (302, "5m02s"), (25_530, "7h05m"), (111_735, "1d07h")],
)
def test_short_duration(seconds: float, text: str) -> None:
    assert short_duration(seconds) == text


def test_join_prefers_more_fields_to_wider_spaces() -> None:
    assert join_fitting(["ab", "cd", "ef"], 10) == "ab  cd  ef"
    assert join_fitting(["ab", "cd", "ef"], 9) == "ab cd ef"
    assert join_fitting(["ab", "cd", "ef"], 7) == "ab  cd"
    assert join_fitting(["abcdef", "gh"], 4) == "abcd"


def test_time_left_follows_the_steps_and_waits_during_other_work() -> None:
    state = LiveState()

    def left(*records: logging.LogRecord, seconds: float) -> str:
        for found in records:
            state.follow(found)
        return state.text(120, DAY + seconds).plain.partition("left ")[2].split()[0]

    # 100 steps of 10 s are left of 1,000,000.
    logged = metrics(step=999_900, seconds_left=1000.0)
    assert left(step(999_899), logged, step(999_900), seconds=4.0) == "16m36s"
    assert left(step(999_950), seconds=0.0) == "8m20s"
    # A step that takes longer than those before it does not count down what follows it.
    assert left(seconds=500.0) == "8m10s"
    assert left(step(999_950, "sampling"), seconds=500.0) == "8m20s"
    after = step(999_950)
    after.created = DAY + 600.0
    assert left(after, seconds=603.0) == "8m17s"
    assert left(step(1_000_000), seconds=700.0) == "0s"
