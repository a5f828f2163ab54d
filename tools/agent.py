"""The ranks of this node: start them, pass signals on to them, and tell how they ended.

torchrun's own agent, used as a library: its command gives ranks that save 30 seconds, and ranks
that hang just as many; it dies of SIGUSR1, and listens on every interface.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    LogsDest,
    SignalException,
)
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from config import ConfigError
from runtime import exit_codes
from runtime.control import SIGNALS
from runtime.post_mortem import STORE_SECONDS, Verdict, is_alarmed, judge
from runtime.run_folder import make_folder

# Seconds that ranks have to save after a signal before they are killed.
SHUTDOWN_SECONDS = 120
# A process that waits for a driver or for a disk does not even hear SIGKILL.
KILL_SECONDS = 5
RENDEZVOUS_SECONDS = 900
LISTEN_SECONDS = 1.0
# Seconds that ranks have to end by themselves after the head node's launcher ended.
FAREWELL_SECONDS = 30.0
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
    """What the first rank that failed told torchrun."""
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
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(number.name for number in SIGNALS)
    os.environ["LAUNCHER_PID"] = str(os.getpid())
    # It says less about a failure than the launcher does.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    store = open_store(nodes, RENDEZVOUS_SECONDS)
    if logs is not None:
        logs = logs / _agreed(store, nodes, time.strftime("%Y%m%d-%H%M%S"))
        _keep_flight_records(logs)
        new = [folder for folder in (logs, *logs.parents) if not folder.exists()]
    rendezvous = StaticTCPRendezvous(
        store.host, store.port, nodes.rank, nodes.count, "shardloom", RENDEZVOUS_SECONDS
    )
    spec = WorkerSpec(
        role="rank",
        local_world_size=n_ranks,
        rdzv_handler=rendezvous,
        entrypoint=sys.executable,
        args=("-u", *program),
        max_restarts=0,
        master_addr=store.host,
        master_port=store.port,
    )
    with tempfile.TemporaryDirectory() as folder:
        agent = Agent(spec, RankLogs(folder, shown, logs), store, has_others=nodes.count > 1)
        message, received = "", None
        try:
            failures = agent.run().failures.values()
            if failures:
                message = str(min(failures, key=lambda failure: failure.timestamp).message)
        except SignalException as error:
            received = error.sigval
            agent.judge_failure()
        finally:
            # Ranks that still run, as after a third request to stop, are waited for no longer.
            agent.kill([rank for rank, code in agent.exit_codes().items() if code is None])
            agent.stop_listening()
    codes = {rank: code for rank, code in agent.exit_codes().items() if code is not None}
    if logs is not None:
        _forget_empty(logs, list(codes), new)
    return End(codes, message, received, agent.verdict)


def _agreed(store: dist.Store, nodes: Nodes, text: str) -> str:
    """The ``text`` of the head node's launcher, on all nodes."""
    if nodes.rank == 0:
        store.set("launcher/start", text)
    return store.get("launcher/start").decode()


def _keep_flight_records(logs: Path) -> None:
    """Have NCCL dump the latest collectives when one of them times out; see torchfrtrace."""
    for name, value in {
        "NCCL_DEBUG": "WARN",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": str(logs / "flight-record-"),
    }.items():
        os.environ.setdefault(name, value)


def _forget_empty(logs: Path, ranks: list[int], new: list[Path]) -> None:
    """Remove logs of ranks that said nothing, and empty new folders, as of a refused start.

    ``new``: the folders that were not there before, the innermost first.
    """
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
        # Left to itself, the store would listen on every interface. The one that the agent makes,
        # on the same port of the same process, will be this one.
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


class RankLogs(DefaultLogsSpecs):
    """Sends the output of ranks that are not shown to files in ``logs``."""

    def __init__(self, scratch: str, shown: set[int], logs: Path | None) -> None:
        super().__init__(scratch, local_ranks_filter=shown)
        self._shown, self._logs = shown, logs

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        destinations = super().reify(envs)
        if self._logs is not None:
            try:
                make_folder(self._logs.parent)
                self._logs.mkdir(mode=0o700, exist_ok=True)
            except OSError as error:
                raise ConfigError([f"job.output_dir: {error}"]) from None
            for local, environment in envs.items():
                if local not in self._shown:
                    path = str(self._logs / f"rank-{environment['RANK']}")
                    destinations.stdouts[local] = f"{path}.out"
                    destinations.stderrs[local] = f"{path}.err"
        return destinations


class Agent(LocalElasticAgent):
    """Asks who failed before it ends the others, and gives ranks time to save after a signal."""

    def __init__(
        self, spec: WorkerSpec, logs: DefaultLogsSpecs, store: dist.TCPStore, *, has_others: bool
    ) -> None:
        super().__init__(spec, logs)
        self._ranks_store = store
        self.verdict: Verdict | None = None
        self._is_alarmed, self._is_over = threading.Event(), threading.Event()
        self._listener: threading.Thread | None = None
        if has_others:
            # A connection of its own: only one thread at a time can wait for an answer on one.
            mine = dist.TCPStore(store.host, store.port, is_master=False)
            self._listener = threading.Thread(target=self._listen, args=(mine,), daemon=True)
            self._listener.start()

    def exit_codes(self) -> dict[int, int | None]:
        """The exit codes of this node's ranks; None for one that runs."""
        workers = self.get_worker_group().workers
        ranks = {worker.local_rank: worker.global_rank for worker in workers}
        return {ranks[local]: process.poll() for local, process in self._processes().items()}

    def judge_failure(self) -> None:
        """At the first failure of a rank, find out why it failed, and end the ranks that hang."""
        codes = self.exit_codes()
        is_over = set(codes.values()) <= MEANT
        has_failed = not set(codes.values()) <= MEANT | {None}
        if self.verdict is not None or is_over or not (has_failed or self._is_alarmed.is_set()):
            return
        world_size = self.get_worker_group().workers[0].world_size
        verdicts: list[Verdict] = []

        def ask() -> None:
            with suppress(dist.DistError):
                verdicts.append(judge(self._ranks_store, world_size, self.exit_codes))

        # Behind a cut link the head's store would keep us waiting for a quarter of an hour.
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(STORE_SECONDS)
        lines = ["the launcher of the head node does not answer"]
        unheard = Verdict(lines, traceback="", silent=list(codes))
        self.verdict = verdicts[0] if verdicts else unheard
        # Ranks that hang do not hear SIGTERM either, after which torchrun would wait for them.
        self.kill(self.verdict.silent)

    def _listen(self, store: dist.Store) -> None:
        """Hear of failures on other nodes, as here all ranks may hang and none have failed."""
        try:
            while not is_alarmed(store):
                if self._is_over.wait(LISTEN_SECONDS):
                    return
        except dist.DistError:
            # The head has left. If it had no reason to, ranks here are on their way out as well.
            self._is_over.wait(FAREWELL_SECONDS)
        self._is_alarmed.set()

    def stop_listening(self) -> None:
        """End the thread that listens: if its call to the store returned while Python exits, it
        would abort the process. Behind a cut link the call does not return."""
        self._is_over.set()
        if self._listener is not None:
            self._listener.join(2 * LISTEN_SECONDS)

    def kill(self, ranks: list[int]) -> None:
        """Kill those of ``ranks`` that run on this node, and all that they started."""
        for worker in self.get_worker_group().workers:
            process = self._processes().get(worker.local_rank)
            if worker.global_rank in ranks and process is not None and process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(KILL_SECONDS)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self.judge_failure()
        return super()._monitor_workers(worker_group)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 0) -> None:
        # torch 2.11 always takes 30 seconds.
        if self._pcontext is not None:
            self._pcontext.close(death_sig, timeout=SHUTDOWN_SECONDS)

    def _processes(self) -> dict[int, subprocess.Popen[bytes]]:
        """The processes of this node's ranks, by local rank."""
        if self._pcontext is None:
            return {}
        assert isinstance(self._pcontext, SubprocessContext)
        handlers = self._pcontext.subprocess_handlers
        return {local: handler.proc for local, handler in handlers.items()}
