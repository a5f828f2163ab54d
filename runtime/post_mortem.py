"""Which rank failed, which one hangs, and where: told through the store that the launcher keeps.

Every rank says now and then where it is. The first that fails raises an alarm, and all ranks that
still can leave their last words and exit. A rank that does not answer is dead or hangs; the
launcher, whose store survives the ranks, names it.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

import torch.distributed as dist

from runtime import exit_codes
from runtime.machine import die_with_parent
from runtime.release import name_release

ROOT = Path(__file__).parents[1]
PREFIX = "post_mortem"
ALARM = "alarm"
HEARTBEAT_SECONDS = 5.0
POLL_SECONDS = 0.2
# How long the launcher waits for last words, and how long a rank without an error of its own
# waits for one before it leaves.
PATIENCE_SECONDS = 1.0
# Behind a cut link the store keeps whoever asks it waiting, for a quarter of an hour.
STORE_SECONDS = 10.0
# More would hide the first ones.
MOST_NAMED = 8


@dataclass(frozen=True)
class Words:
    """What a rank said last."""

    rank: int
    host: str
    time: str
    step: int
    place: str
    """The innermost line of ours that it was in."""
    error: str = ""
    traceback: str = ""
    order: int = 0
    """Place among those that failed: 1 failed first; 0: it did not fail."""


@dataclass(frozen=True)
class Verdict:
    """What the launcher found out about a failure."""

    lines: list[str]
    """For people, the cause first."""
    traceback: str
    """That of the first error; "" if a rank was killed, which then is taken for the cause."""
    silent: list[int]
    """Ranks that run, as far as this node can see, but do not answer."""


class Witness:
    """Ties this rank to its launcher: the trainer assigns ``step``, a thread does the rest.

    From construction on, this process ends when its launcher does (on Linux). As a context: an
    error that leaves it is told to the launcher and ends the process at once, whatever threads and
    process groups wait for. ``environment`` is the launcher's or torchrun's; without either,
    nothing happens.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        if "LAUNCHER_PID" in environment:
            die_with_parent(int(environment["LAUNCHER_PID"]))
        self.step = 0
        self._rank = int(environment.get("RANK", 0))
        self._is_alone = environment.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
        store = dist.HashStore() if self._is_alone else _connect(environment)
        self._store = dist.PrefixStore(PREFIX, store)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._say("heard", self._here())
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        if isinstance(error, Exception):
            name_release(error)
        self._thread.join(STORE_SECONDS)
        if self._thread.is_alive() and isinstance(error, Exception):
            traceback.print_exception(error)
            os._exit(exit_codes.FAILED)
        if self._is_alone or self._thread.is_alive():
            return
        try:
            if isinstance(error, Exception):
                self._tell(error)
            else:
                # Others may fail while this process is on its way out.
                self._say("words", self._here())
        except dist.DistError:
            # The launcher, which would print it, is gone.
            if error is not None:
                traceback.print_exception(error)
        if isinstance(error, Exception):
            os._exit(exit_codes.FAILED)

    def _watch(self) -> None:
        next_beat = time.monotonic() + HEARTBEAT_SECONDS
        try:
            while not self._store.check([ALARM]):
                if time.monotonic() >= next_beat:
                    self._say("heard", self._here())
                    next_beat += HEARTBEAT_SECONDS
                if self._is_over.wait(POLL_SECONDS):
                    return
            self._say("words", self._here())
        except dist.DistError:
            return
        if not self._is_over.wait(PATIENCE_SECONDS):
            os._exit(exit_codes.FAILED)

    def _tell(self, error: Exception) -> None:
        outward = reversed(list(traceback.walk_tb(error.__traceback__)))
        words = replace(
            self._here(),
            place=_place(outward),
            error=f"{type(error).__name__}: {error}".partition("\n")[0],
            traceback="".join(traceback.format_exception(error)),
            order=self._store.add("failures", 1),
        )
        self._say("words", words)
        self._store.set(ALARM, "")

    def _here(self) -> Words:
        """Where the main thread is now."""
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        return Words(
            rank=self._rank,
            host=socket.gethostname(),
            time=time.strftime("%H:%M:%S"),
            step=self.step,
            place=_place(traceback.walk_stack(frame)),
        )

    def _say(self, key: str, words: Words) -> None:
        self._store.set(f"{key}/{words.rank}", json.dumps(asdict(words)))


def _connect(environment: Mapping[str, str]) -> dist.Store:
    """Connect to the launcher's store. A process group uses its connection while it waits."""
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=30))


def judge(
    store: dist.Store, world_size: int, exit_codes_here: Callable[[], Mapping[int, int | None]]
) -> Verdict:
    """Raise the alarm, hear the ranks' last words and find the cause; for the launcher.

    ``exit_codes_here`` returns the exit codes of this node's ranks, None for one that runs. Waits
    for at most ``PATIENCE_SECONDS``.
    """
    store = dist.PrefixStore(PREFIX, store)
    store.set(ALARM, "")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        codes = exit_codes_here()
        if store.check([f"words/{r}" for r in range(world_size) if codes.get(r) is None]):
            break
        time.sleep(POLL_SECONDS / 10)
    ended = {rank: code for rank, code in exit_codes_here().items() if code is not None}
    said = _read(store, "words", world_size)
    known = _read(store, "heard", world_size) | said
    mute = [rank for rank in range(world_size) if rank not in said]
    silent = [rank for rank in mute if rank not in ended]
    # A rank that waits for the one at fault may be aborted for waiting: NCCL does that.
    killed = [r for r in mute if r in ended and ended[r] != -signal.SIGABRT]
    aborted = [r for r in mute if r in ended and ended[r] == -signal.SIGABRT]
    errors = sorted((words for words in said.values() if words.error), key=lambda w: w.order)
    # Ranks that ended without saying why, told only where no other cause is known.
    quiet = [] if killed or silent or errors else [r for r in ended if ended[r]]
    waiting: dict[str, list[int]] = {}
    for words in said.values():
        if not words.error:
            waiting.setdefault(_where(words), []).append(words.rank)
    lines = [
        *(f"{_who([rank], known)} {_death(ended[rank])}" for rank in [*killed, *quiet]),
        *(f"{_who([rank], known)} did not answer{_last_heard(rank, known)}" for rank in silent),
        *(f"{_who([w.rank], known)} failed {_where(w)}: {w.error}" for w in errors[:1]),
        *(f"{_who([rank], known)} {_death(ended[rank])}" for rank in aborted),
        *(f"{_who(ranks, known)}: {where}" for where, ranks in waiting.items()),
    ]
    more = [f"and {len(lines) - MOST_NAMED} more"] if len(lines) > MOST_NAMED else []
    return Verdict(
        lines=lines[:MOST_NAMED] + more,
        traceback=errors[0].traceback if errors and not killed else "",
        silent=silent,
    )


def is_alarmed(store: dist.Store) -> bool:
    """Whether a rank has failed, as far as ``store`` knows; ``dist.DistError`` if it is gone."""
    return dist.PrefixStore(PREFIX, store).check([ALARM])


def _read(store: dist.Store, key: str, world_size: int) -> dict[int, Words]:
    known = [rank for rank in range(world_size) if store.check([f"{key}/{rank}"])]
    return {rank: Words(**json.loads(store.get(f"{key}/{rank}"))) for rank in known}


def _who(ranks: list[int], known: Mapping[int, Words]) -> str:
    first = ranks[0]
    host = f" ({known[first].host})" if first in known else ""
    return f"rank {first}{host}" + (f" and {len(ranks) - 1} more" if len(ranks) > 1 else "")


def _where(words: Words) -> str:
    return f"in step {words.step} at {words.place}"


def _last_heard(rank: int, known: Mapping[int, Words]) -> str:
    if rank not in known:
        return ", and was never heard of"
    return f"; last heard at {known[rank].time} {_where(known[rank])}"


def _death(code: int) -> str:
    names = {number.value: number.name for number in signal.Signals}
    return f"was ended by {names.get(-code, -code)}" if code < 0 else f"exited with {code}"


def _place(frames: Iterable[tuple[FrameType, int]]) -> str:
    """The first of ``frames``, which come innermost first, that is a line of ours."""
    for frame, line in frames:
        path = Path(os.path.abspath(frame.f_code.co_filename))
        is_ours = path.is_relative_to(ROOT) and "site-packages" not in path.parts
        if is_ours and path != Path(__file__):
            return f"{path.relative_to(ROOT)}:{line}"
    return "an unknown place"
