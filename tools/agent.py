"""The ranks of this node: start them, pass signals on to them, and tell how they ended.

Ranks are told in their environment what torchrun tells them. torchrun itself gives ranks that save
30 seconds, and ranks that hang just as many; it dies of SIGUSR1, and listens on every interface.
"""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from config import ConfigError
from runtime import exit_codes
from runtime.control import SIGNALS
from runtime.post_mortem import STORE_SECONDS, Verdict, is_alarmed, judge
from runtime.run_folder import make_folder

POLL_SECONDS = 0.1
# Seconds that ranks have to save after a signal before they are killed.
SHUTDOWN_SECONDS = 120
# A process that waits for a driver or for a disk does not even hear SIGKILL.
KILL_SECONDS = 5
RENDEZVOUS_SECONDS = 900
LISTEN_SECONDS = 1.0
# Seconds that ranks have to end after another rank, or the head node's launcher, ended.
FAREWELL_SECONDS = 30.0
# Seconds that a launcher whose ranks are done waits for those of other nodes.
PARTING_SECONDS = 300.0
# Exit codes of ranks that end on purpose; the other ranks are then on their way out too.
MEANT = {
    exit_codes.DONE,
    exit_codes.BAD_CONFIG,
    exit_codes.PREEMPTED,
    exit_codes.DO_NOT_REQUEUE,
}


@dataclass(frozen=True)
class Nodes:
    """The nodes of this run, and which one this is."""

    count: int
    rank: int
    address: str
    port: int


@dataclass(frozen=True)
class End:
    """How this node's ranks ended."""

    codes: dict[int, int]
    """Exit codes by rank; for one killed by a signal, minus its number."""
    message: str
    """What a rank found wrong with the configuration; "" if none did."""
    signal: signal.Signals | None
    """The signal that told the launcher to stop, if one did."""
    verdict: Verdict | None
    """On a failure that no rank meant; None: there was none."""


def run_ranks(
    program: list[str], *, n_ranks: int, nodes: Nodes, shown: set[int], logs: Path | None = None
) -> End:
    """Run Python on ``program`` once per rank of this node; return when all have ended.

    ``shown`` are the ranks of this node whose output is shown. That of the others goes to ``logs``,
    into a folder of this start, or nowhere; ``ConfigError`` if the folder cannot be made.
    """
    store = open_store(nodes, RENDEZVOUS_SECONDS)
    counts, started = _meet(store, nodes, n_ranks)
    if logs is not None:
        logs = logs / started
        new = _make_logs(logs)
    requests: list[signal.Signals] = []
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: requests.append(signal.Signals(number)))
    with tempfile.TemporaryDirectory() as scratch:
        first = sum(counts[: nodes.rank])
        told = {rank: Path(scratch) / f"{rank}.json" for rank in range(first, first + n_ranks)}
        environment = _environment(store, nodes, counts, logs)
        processes = _start(program, environment, told, shown=shown, logs=logs)
        agent = Agent(processes, store, sum(counts))
        agent.wait(requests, has_others=nodes.count > 1)
        codes = {rank: code for rank, code in agent.exit_codes().items() if code is not None}
        mistakes = [
            str(json.loads(path.read_text())["message"])
            for rank, path in told.items()
            if codes.get(rank) == exit_codes.BAD_CONFIG and path.exists()
        ]
    received = requests[0] if requests else None
    if received is None and agent.verdict is None and set(codes.values()) == {exit_codes.DONE}:
        _part(store, nodes, requests)
    if logs is not None:
        _forget_empty(logs, list(codes), new)
    return End(codes, "".join(mistakes[:1]), received, agent.verdict)


def _meet(store: dist.Store, nodes: Nodes, n_ranks: int) -> tuple[list[int], str]:
    """Wait for the launchers of all nodes; return the ranks of each, and the head's time."""
    mine = [n_ranks, time.strftime("%Y%m%d-%H%M%S")]
    store.set(f"launcher/{nodes.rank}", json.dumps(mine))
    told = [json.loads(store.get(f"launcher/{node}")) for node in range(nodes.count)]
    return [count for count, _ in told], told[0][1]


def _part(store: dist.Store, nodes: Nodes, requests: list[signal.Signals]) -> None:
    """Wait until the ranks of all nodes are done. The head, which serves the store, leaves last."""
    deadline = time.monotonic() + PARTING_SECONDS
    wanted = nodes.count if nodes.rank > 0 else 2 * nodes.count - 1
    with suppress(dist.DistError):
        count = store.add("launcher/done", 1)
        while count < wanted and not requests and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            count = store.add("launcher/done", 0)
        # All but the head count twice: when they are done, and when they leave.
        store.add("launcher/done", 1)


def _environment(
    store: dist.TCPStore, nodes: Nodes, counts: list[int], logs: Path | None
) -> dict[str, str]:
    """What all ranks of this node are told: as by torchrun, as far as PyTorch or we read it."""
    # Have NCCL dump the latest collectives when one of them times out; see torchfrtrace.
    flight_records = {
        "NCCL_DEBUG": "WARN",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": f"{logs}/flight-record-",
    }
    return {
        **({} if logs is None else flight_records),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        **os.environ,
        "GROUP_RANK": str(nodes.rank),
        "LOCAL_WORLD_SIZE": str(counts[nodes.rank]),
        "WORLD_SIZE": str(sum(counts)),
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
        "LAUNCHER_PID": str(os.getpid()),
    }


def _start(
    program: list[str],
    environment: dict[str, str],
    told: dict[int, Path],
    *,
    shown: set[int],
    logs: Path | None,
) -> dict[int, subprocess.Popen[bytes]]:
    """The processes of this node's ranks, by rank; each leads a process group."""
    processes = {}
    for local, (rank, path) in enumerate(told.items()):
        own = {"RANK": str(rank), "LOCAL_RANK": str(local), "TORCHELASTIC_ERROR_FILE": str(path)}
        logged = [f"{logs}/rank-{rank}.{suffix}" for suffix in ("out", "err")]
        with ExitStack() as files:
            out, err = (
                None if local in shown else files.enter_context(open(log, "wb"))
                for log in (logged if logs is not None else [os.devnull] * 2)
            )
            processes[rank] = subprocess.Popen(
                [sys.executable, "-u", *program],
                env=environment | own,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
    return processes


def _make_logs(logs: Path) -> list[Path]:
    """Return the folders that were not there before, the innermost first."""
    new = [folder for folder in (logs, *logs.parents) if not folder.exists()]
    try:
        make_folder(logs.parent)
        logs.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError([f"job.output_dir: {error}"]) from None
    return new


def _forget_empty(logs: Path, ranks: list[int], new: list[Path]) -> None:
    """Remove logs of ranks that said nothing, and empty ``new`` folders, as of a refused start."""
    for path in (logs / f"rank-{rank}.{suffix}" for rank in ranks for suffix in ("out", "err")):
        if path.exists() and path.stat().st_size == 0:
            path.unlink()
    with suppress(OSError):  # the first that is not empty
        for folder in new:
            folder.rmdir()


def open_store(nodes: Nodes, seconds: int) -> dist.TCPStore:
    """Connect to the store of the run's ranks and agents, which the head node's launcher serves."""
    address, port, listener = nodes.address, nodes.port, None
    if nodes.count == 1:
        # Left to itself, the store would listen on every interface.
        server = socket.create_server(("127.0.0.1", 0))
        (address, port), listener = server.getsockname(), server.detach()
    return dist.TCPStore(
        address,
        port,
        is_master=nodes.rank == 0,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener,
    )


class Agent:
    """Asks who failed before it ends the others, and gives ranks time to save after a signal."""

    def __init__(
        self, processes: dict[int, subprocess.Popen[bytes]], store: dist.TCPStore, world_size: int
    ) -> None:
        self._processes, self._store, self._world_size = processes, store, world_size
        self._is_alarmed, self._is_over = threading.Event(), threading.Event()
        self.verdict: Verdict | None = None

    def exit_codes(self) -> dict[int, int | None]:
        """The exit codes of this node's ranks; None for one that runs."""
        return {rank: process.poll() for rank, process in self._processes.items()}

    def wait(self, requests: list[signal.Signals], *, has_others: bool) -> None:
        """Return when all ranks have ended, by themselves or because of one that failed.

        Of ``requests``, which may grow, the first is passed on, so that ranks save and end; the
        second sends SIGTERM, with as much time again; the third kills them.
        """
        listener = threading.Thread(target=self._listen, daemon=True)
        if has_others:
            listener.start()
        n_passed_on, deadline = 0, math.inf
        while (
            None in self.exit_codes().values() and time.monotonic() < deadline and len(requests) < 3
        ):
            if n_passed_on < len(requests):
                self._send(signal.SIGTERM if n_passed_on else requests[0], self._processes)
                n_passed_on += 1
                deadline = time.monotonic() + SHUTDOWN_SECONDS
            elif deadline == math.inf:
                self._judge_failure()
                has_ended = not set(self.exit_codes().values()) <= {None, exit_codes.DONE}
                if has_ended or self.verdict is not None:
                    self._send(signal.SIGTERM, self._processes)
                    deadline = time.monotonic() + FAREWELL_SECONDS
            time.sleep(POLL_SECONDS)
        self._send(signal.SIGKILL, self._processes)
        with suppress(subprocess.TimeoutExpired):
            for process in self._processes.values():
                process.wait(KILL_SECONDS)
        self._judge_failure()
        # If its call to the store returned while Python exits, it would abort the process. Behind a
        # cut link the call does not return.
        self._is_over.set()
        if has_others:
            listener.join(2 * LISTEN_SECONDS)

    def _judge_failure(self) -> None:
        """At the first failure of a rank, find out why it failed, and end the ranks that hang."""
        codes = self.exit_codes()
        is_over = set(codes.values()) <= MEANT
        has_failed = not set(codes.values()) <= MEANT | {None}
        if self.verdict is not None or is_over or not (has_failed or self._is_alarmed.is_set()):
            return
        verdicts: list[Verdict] = []

        def ask() -> None:
            with suppress(dist.DistError):
                verdicts.append(judge(self._store, self._world_size, self.exit_codes))

        # Behind a cut link the head's store would keep us waiting for a quarter of an hour.
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(STORE_SECONDS)
        lines = ["the launcher of the head node does not answer"]
        unheard = Verdict(lines, traceback="", silent=list(codes))
        self.verdict = verdicts[0] if verdicts else unheard
        # Ranks that hang do not hear SIGTERM either.
        self._send(signal.SIGKILL, self.verdict.silent)

    def _listen(self) -> None:
        """Hear of failures on other nodes, as here all ranks may hang and none have failed."""
        try:
            # A connection of its own: only one thread at a time can wait for an answer on one.
            store = dist.TCPStore(self._store.host, self._store.port, is_master=False)
            while not is_alarmed(store):
                if self._is_over.wait(LISTEN_SECONDS):
                    return
        except dist.DistError:
            # The head has left. If it had no reason to, ranks here are on their way out as well.
            self._is_over.wait(FAREWELL_SECONDS)
        self._is_alarmed.set()

    def _send(self, number: signal.Signals, ranks: Collection[int]) -> None:
        """Send a signal to those of ``ranks`` that run on this node, and all that they started."""
        for rank, process in self._processes.items():
            if rank in ranks and process.poll() is None:
                with suppress(ProcessLookupError):  # Another thread saw it end.
                    os.killpg(process.pid, number)
