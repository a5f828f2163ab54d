"""Failure reporting over the launcher's TCPStore: which rank failed or hangs, and where.

Every rank sends heartbeats with its step and source line. On the first error the failing rank sets
``ABORT``; all live ranks then send a rank report and exit. The launcher, whose store outlives the
ranks, reports a rank that does not answer as dead or hung.
"""

import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

import torch.distributed as dist

from launcher.flight_records import hanging_ranks, write_cpu_record
from runtime import exit_codes
from runtime.printable import error_line, format_traceback, with_causes
from runtime.release import add_release_note
from runtime.signals import die_with_parent

ROOT = Path(__file__).parents[1]
DISTRIBUTED = Path(dist.__file__).absolute().parent
TORCH, LIBRARY = DISTRIBUTED.parent, Path(os.__file__).absolute().parent
PREFIX = "post_mortem"
ABORT = "abort"
# Lines of a rank and its exit code: of those that ended without a report, on any node.
EXITS = "exits"
HEARTBEAT_SECONDS = 5.0
POLL_SECONDS = 0.2
# Time for rank reports: the launcher waits for them, and so does a rank without an error of its
# own before it exits.
REPORT_TIMEOUT_SECONDS = 1.0
# With a millisecond more for each rank, because one store serves them all, it is at most this.
MAX_REPORT_TIMEOUT_SECONDS = 5.0
# If the network link is down, a call to the store blocks for 15 minutes.
STORE_SECONDS = 10.0
# Whose reports a launcher waits for together.
RANKS_AT_ONCE = 64
# More lines would hide the first ones.
MAX_LINES = 8
# Errors of a rank whose peer died, hangs or is late.
CONSEQUENCE = re.compile(
    r"gloo/transport|NCCL|\bDist\w*Error|timed? ?out|connection (closed|reset)|broken pipe", re.I
)


@dataclass(frozen=True)
class RankReport:
    """Last state of a rank, as a heartbeat or as its final report."""

    rank: int
    host: str
    time: str
    step: int
    place: str
    """Innermost Shardloom source line, ``file:line``."""
    error: str = ""
    traceback: str = ""
    order: int = 0
    """Order among failed ranks, from 1; 0: it did not fail."""
    collective: str = ""
    """Function of torch.distributed that ``place`` is in, such as all_reduce; "": in none."""


@dataclass(frozen=True)
class FailureReport:
    """The launcher's diagnosis of a failure."""

    lines: list[str]
    """Human-readable lines, the cause first."""
    traceback: str
    """Traceback of the first error; "" if that is the consequence of a killed rank."""
    silent: list[int]
    """Ranks that did not report and that, as far as the launchers say, still run."""
    n_causes: int = 0
    """First of ``lines`` that give a cause; the rest are consequences."""
    is_hang: bool = False
    """Ranks waited for others, whose flight records may say for whom."""


class RankHeartbeat:
    """Context manager that reports this rank to its launcher.

    The trainer assigns ``step``, and ``failure`` if it ends as failed without an exception.

    A thread sends heartbeats. An error that leaves the context is reported and ends the process at
    once, whatever threads and process groups wait for. From construction on, this process dies
    with its launcher (Linux only). ``environment`` is the launcher's or torchrun's; without
    either, the context does nothing.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        if "LAUNCHER_PID" in environment:
            die_with_parent(int(environment["LAUNCHER_PID"]))
        self.step, self.failure = 0, ""
        self._rank = int(environment.get("RANK", 0))
        self._is_standalone = environment.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
        store = dist.HashStore() if self._is_standalone else _connect(environment)
        self._store = dist.PrefixStore(PREFIX, store)
        self._is_finished = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._put("heartbeat", self._snapshot())
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_finished.set()
        if isinstance(error, Exception):
            add_release_note(error)
        self._thread.join(STORE_SECONDS)
        if self._thread.is_alive() and isinstance(error, Exception):
            print(format_traceback(error), end="", file=sys.stderr)
            os._exit(exit_codes.FAILED)
        if self._is_standalone or self._thread.is_alive():
            return
        try:
            if isinstance(error, Exception):
                self._report_error(error)
            else:
                # Another rank may fail while this process exits.
                self._put("report", self._snapshot())
        except dist.DistError:
            # The launcher, which would print it, has exited.
            if error is not None:
                print(format_traceback(error), end="", file=sys.stderr)
        if isinstance(error, Exception):
            os._exit(exit_codes.FAILED)

    def _watch(self) -> None:
        next_beat = time.monotonic() + HEARTBEAT_SECONDS
        try:
            while not self._store.check([ABORT]):
                if time.monotonic() >= next_beat:
                    self._put("heartbeat", self._snapshot())
                    next_beat += HEARTBEAT_SECONDS
                if self._is_finished.wait(POLL_SECONDS):
                    return
            # Before the report, because the launcher reads it once all ranks have reported.
            write_cpu_record(os.environ)
            self._put("report", self._snapshot())
        except dist.DistError:
            return
        if not self._is_finished.wait(REPORT_TIMEOUT_SECONDS):
            os._exit(exit_codes.FAILED)

    def _report_error(self, error: Exception) -> None:
        outermost_first = [
            frame for each in with_causes(error) for frame in traceback.walk_tb(each.__traceback__)
        ]
        innermost_first = outermost_first[::-1]
        report = replace(
            self._snapshot(),
            place=_place(innermost_first),
            collective=_collective(innermost_first),
            error=error_line(error),
            traceback=format_traceback(error),
            order=self._store.add("failures", 1),
        )
        write_cpu_record(os.environ)
        self._put("report", report)
        self._store.set(ABORT, "")

    def _snapshot(self) -> RankReport:
        """Return the current step and the main thread's position."""
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        return RankReport(
            rank=self._rank,
            host=socket.gethostname(),
            time=time.strftime("%H:%M:%S"),
            step=self.step,
            place=_place(traceback.walk_stack(frame)),
            error=self.failure,
            collective=_collective(traceback.walk_stack(frame)),
        )

    def _put(self, key: str, report: RankReport) -> None:
        self._store.set(f"{key}/{report.rank}", json.dumps(asdict(report)))


def _connect(environment: Mapping[str, str]) -> dist.Store:
    """Open a connection of its own: a process group uses its connection while it waits."""
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=30))


def diagnose(
    store: dist.Store, world_size: int, exit_codes_here: Callable[[], Mapping[int, int | None]]
) -> FailureReport:
    """Set ``ABORT``, collect rank reports and find the cause. The head's launcher calls it.

    ``exit_codes_here`` returns the exit codes of this node's ranks, None for a running one. Waits
    at most ``MAX_REPORT_TIMEOUT_SECONDS``. Raises ``dist.DistError`` if the store is gone.
    """
    store = dist.PrefixStore(PREFIX, store)
    _await_reports(store, world_size, range(world_size), exit_codes_here)
    ended = _ended(exit_codes_here()) | _exits(store)
    reports = _read(store, "report", world_size)
    known = _read(store, "heartbeat", world_size) | reports
    unreported = [rank for rank in range(world_size) if rank not in reports]
    silent = [rank for rank in unreported if rank not in ended]
    # NCCL may abort a rank that waits for the failed one, so SIGABRT is not the cause.
    killed = [r for r in unreported if r in ended and ended[r] != -signal.SIGABRT]
    aborted = [r for r in unreported if r in ended and ended[r] == -signal.SIGABRT]
    errors = sorted((r for r in reports.values() if r.error), key=lambda report: report.order)
    # Ranks that exited without an error report, listed only if no other cause is known.
    unexplained = [] if killed or silent or errors else [r for r in ended if ended[r]]
    waiting, absent = _group_by_place(reports, errors[:1])
    failed = [f"{_who([e.rank], known)} failed {_where(e)}: {e.error}" for e in errors[:1]]
    has_own = bool(errors) and not CONSEQUENCE.search(errors[0].error)
    causes = [
        *(failed if has_own else []),
        *(f"{_who([rank], known)} {_exit_text(ended[rank])}" for rank in [*killed, *unexplained]),
        *_did_not_answer(silent, known),
        *(f"{_who(ranks, known)} did not join the others: {where}" for where, ranks in absent),
        *([] if has_own else failed),
    ]
    lines = [
        *causes,
        *(f"{_who([rank], known)} {_exit_text(ended[rank])}" for rank in aborted),
        *(f"{_who(ranks, known)}: {where}" for where, ranks in waiting),
    ]
    rest = [f"and {len(lines) - MAX_LINES} more"] if len(lines) > MAX_LINES else []
    return FailureReport(
        lines=lines[:MAX_LINES] + rest,
        traceback=errors[0].traceback if has_own or (errors and not killed) else "",
        silent=silent,
        n_causes=min(len(causes), MAX_LINES),
        is_hang=not killed and (bool(silent or aborted) or _is_timeout(errors[:1])),
    )


def silent_ranks(
    store: dist.Store,
    world_size: int,
    ranks: Sequence[int],
    exit_codes_here: Callable[[], Mapping[int, int | None]],
) -> list[int]:
    """Set ``ABORT``; return those of this node's ``ranks`` that run and do not report.

    Other nodes' launchers call it. Waits and raises as ``diagnose`` does.
    """
    store = dist.PrefixStore(PREFIX, store)
    _await_reports(store, world_size, ranks, exit_codes_here)
    codes, reported = exit_codes_here(), _reported(store, "report", ranks)
    return [rank for rank in ranks if rank not in reported and codes[rank] is None]


def _await_reports(
    store: dist.Store,
    world_size: int,
    ranks: Sequence[int],
    exit_codes_here: Callable[[], Mapping[int, int | None]],
) -> None:
    """Set ``ABORT`` and wait; tell the head's launcher which ranks here ended without a report."""
    store.set(ABORT, "")
    seconds = min(REPORT_TIMEOUT_SECONDS + world_size / 1000, MAX_REPORT_TIMEOUT_SECONDS)
    deadline = time.monotonic() + seconds
    pending = list(ranks)
    while pending and time.monotonic() < deadline:
        # Few keys at a time, and those that exist only once.
        if store.check(_keys("report", pending[:RANKS_AT_ONCE])):
            del pending[:RANKS_AT_ONCE]
            continue
        ended = _ended(exit_codes_here())
        if lines := [f"{rank} {ended[rank]}\n" for rank in pending if rank in ended]:
            store.append(EXITS, "".join(lines))  # type: ignore[attr-defined]
        pending = [rank for rank in pending if rank not in ended]
        time.sleep(POLL_SECONDS / 10)


def _ended(codes: Mapping[int, int | None]) -> dict[int, int]:
    return {rank: code for rank, code in codes.items() if code is not None}


def _exits(store: dist.Store) -> dict[int, int]:
    lines = store.get(EXITS).decode().splitlines() if store.check([EXITS]) else []
    return {int(rank): int(code) for rank, code in map(str.split, lines)}


def explained(report: FailureReport | None, logs: Path | None) -> FailureReport | None:
    """Add what flight records in ``logs`` say about a hang, below the causes that are known."""
    if report is None or logs is None or not report.is_hang:
        return report
    n = report.n_causes
    lines = [*report.lines[:n], *hanging_ranks(logs, MAX_LINES), *report.lines[n:]]
    return replace(report, lines=lines)


def _is_timeout(first_error: list[RankReport]) -> bool:
    """True if the first error is that of a collective that timed out."""
    return any(e.collective and re.search("timed? ?out", e.error, re.I) for e in first_error)


def _group_by_place(
    reports: Mapping[int, RankReport], first_error: list[RankReport]
) -> tuple[list[tuple[str, list[int]]], list[tuple[str, list[int]]]]:
    """Group ranks without an error by their place: those that wait, and those that are absent.

    If a collective timed out, a rank that is in none is what the others waited for.
    """
    timed_out = _is_timeout(first_error)
    waiting: dict[str, list[int]] = {}
    absent: dict[str, list[int]] = {}
    for report in reports.values():
        if not report.error:
            groups = absent if timed_out and not report.collective else waiting
            groups.setdefault(_where(report), []).append(report.rank)
    return list(waiting.items()), list(absent.items())


def is_aborted(store: dist.Store) -> bool:
    """True if a rank has set ``ABORT``. Raises ``dist.DistError`` if the store is gone."""
    return dist.PrefixStore(PREFIX, store).check([ABORT])


def _read(store: dist.Store, kind: str, world_size: int) -> dict[int, RankReport]:
    ranks = _reported(store, kind, range(world_size))
    texts = store.multi_get(_keys(kind, ranks)) if ranks else []
    return {rank: RankReport(**json.loads(t)) for rank, t in zip(ranks, texts, strict=True)}


def _reported(store: dist.Store, kind: str, ranks: Sequence[int]) -> list[int]:
    """Return those of ``ranks`` that have such a key, by few requests if nearly all have."""
    if store.check(_keys(kind, ranks)):
        return [*ranks]
    half = len(ranks) // 2
    parts = (ranks[:half], ranks[half:]) if half else ()
    return [rank for part in parts for rank in _reported(store, kind, part)]


def _keys(kind: str, ranks: Iterable[int]) -> list[str]:
    return [f"{kind}/{rank}" for rank in ranks]


def _who(ranks: list[int], known: Mapping[int, RankReport]) -> str:
    first = ranks[0]
    host = f" ({known[first].host})" if first in known else ""
    return f"rank {first}{host}" + (f" and {len(ranks) - 1} more" if len(ranks) > 1 else "")


def _where(report: RankReport) -> str:
    collective = f" in {report.collective}" if report.collective else ""
    return f"in step {report.step} at {report.place}{collective}"


def _did_not_answer(silent: Sequence[int], known: Mapping[int, RankReport]) -> list[str]:
    """One line for all ranks with the same place."""
    groups: dict[str, list[int]] = {}
    for rank in silent:
        groups.setdefault(_where(known[rank]) if rank in known else "", []).append(rank)
    return [
        f"{_who(ranks, known)} did not answer{_last_heartbeat(ranks[0], known)}"
        for ranks in groups.values()
    ]


def _last_heartbeat(rank: int, known: Mapping[int, RankReport]) -> str:
    if rank not in known:
        return "; no heartbeat received"
    return f"; last heartbeat at {known[rank].time} {_where(known[rank])}"


def _exit_text(code: int) -> str:
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by {names.get(-code, -code)}" if code < 0 else f"exited with {code}"


def _collective(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Innermost function of torch.distributed before the first line of a model's or Shardloom's."""
    for frame, _ in frames:
        path = _path(frame)
        if path.is_relative_to(DISTRIBUTED):
            return frame.f_code.co_name
        is_library = path.is_relative_to(LIBRARY) and "site-packages" not in path.parts
        if path.is_absolute() and not path.is_relative_to(TORCH) and not is_library:
            break
    return ""


def _path(frame: FrameType) -> Path:
    """File of ``frame``; no absolute path if it is of none, such as ``<string>``."""
    name = frame.f_code.co_filename
    return Path(name if name.startswith("<") else os.path.abspath(name))


def _is_program(path: Path) -> bool:
    """True if the file is Shardloom's, but not this one, or the user's; no library's."""
    if path.is_relative_to(ROOT):
        # The repository may have an environment in it, or be in one itself.
        return "site-packages" not in path.relative_to(ROOT).parts and path != Path(__file__)
    is_library = path.is_relative_to(LIBRARY) or "site-packages" in path.parts
    return path.is_absolute() and not is_library and not path.is_relative_to(TORCH)


def _place(frames: Iterable[tuple[FrameType, int]]) -> str:
    """First line of ``frames``, ordered innermost first, that is Shardloom's or the user's."""
    for frame, line in frames:
        path = _path(frame)
        if _is_program(path):
            return f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}:{line}"
    return "an unknown place"
