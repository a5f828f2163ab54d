"""Start the ranks of this node, forward signals to them, and report how they ended.

Ranks get torchrun's environment variables. torchrun itself is not used: it gives ranks that save,
and also ranks that hang, 30 seconds; it dies of SIGUSR1 and listens on all interfaces.
"""

import errno
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, MappingProxyType

import torch.distributed as dist

from config import ConfigError, JobConfig, dump_toml
from launcher.console import Console
from launcher.post_mortem import (
    STORE_SECONDS,
    FailureReport,
    diagnose,
    explained,
    is_aborted,
    silent_ranks,
)
from launcher.rank_output import RankOutput
from launcher.rendezvous import (
    POLL_SECONDS,
    READ_SECONDS,
    Nodes,
    PortTaken,
    exit_barrier,
    open_store,
    rendezvous,
)
from runtime import exit_codes
from runtime.filesystem import make_folder, parse_object, reject_link
from runtime.imports import import_variables
from runtime.log import logger, show_phase
from runtime.printable import first_line
from runtime.signals import handle_signals

# Seconds that ranks have to save after a signal, before SIGKILL.
SHUTDOWN_SECONDS = 120
# A process blocked in a driver or on a disk does not react even to SIGKILL.
KILL_SECONDS = 5
RENDEZVOUS_SECONDS = 900
ABORT_POLL_SECONDS = 1.0
# Seconds that ranks have to exit after another rank, or the head node's launcher, exited.
SHUTDOWN_GRACE_SECONDS = 30.0
# Seconds that a launcher whose ranks are done waits for other nodes.
EXIT_BARRIER_SECONDS = 300.0
# Exit codes of ranks that exit on purpose; the other ranks then exit too.
INTENDED_CODES = {
    exit_codes.DONE,
    exit_codes.BAD_CONFIG,
    exit_codes.PREEMPTED,
    exit_codes.DO_NOT_REQUEUE,
}


@dataclass(frozen=True)
class End:
    """Result of this node's ranks."""

    codes: dict[int, int]
    """Exit codes by rank; minus the signal number for a killed rank."""
    message: str
    """Configuration error reported by a rank; "" if there is none."""
    signal: signal.Signals | None
    """First signal that the launcher received, if any."""
    verdict: FailureReport | None
    """Diagnosis of an unintended failure; None without one."""

    @property
    def is_before_training(self) -> bool:
        """True if the signal killed a rank, which had no handlers yet: the run had not begun."""
        if self.signal is None:
            return False
        # The others waited for it to connect, until they were killed.
        codes = {*self.codes.values()}
        return codes <= {-self.signal, -signal.SIGKILL} and (not codes or -self.signal in codes)


def run_ranks(
    program: list[str],
    config: JobConfig,
    *,
    n_ranks: int,
    nodes: Nodes,
    shown: set[int],
    console: Console,
    logs: Path | None = None,
    mistake: str = "",
    variables: Mapping[str, str] = MappingProxyType({}),
) -> End:
    """Run Python on ``program`` once per rank of this node; return when all have exited.

    Its last argument is a file with the keys of ``config``. The output of all ranks goes to a new
    folder in ``logs``, and that of the local ranks ``shown`` to the ``console``. ``mistake``: of
    ``config``, if all nodes have ``n_ranks``. Raises ``ConfigError`` for it or another node's, and
    if the folder cannot be created. Installs signal handlers.
    """
    _show_waiting(nodes, n_ranks, mistake)
    # Before the rendezvous, after which another node may create them.
    parents = [] if logs is None else [f for f in (logs, *logs.parents) if not f.exists()]
    try:
        store = open_store(nodes, RENDEZVOUS_SECONDS)
        counts, started = rendezvous(store, nodes, RENDEZVOUS_SECONDS, n_ranks, mistake)
        if logs is not None:
            logs = _make_logs_on_all_nodes(store, nodes, logs / started, parents)
    except (dist.DistError, PortTaken) as error:
        return _failed_rendezvous(nodes, error)
    requests: list[signal.Signals] = []
    handle_signals(lambda number, frame: requests.append(signal.Signals(number)))
    with tempfile.TemporaryDirectory() as scratch:
        first = sum(counts[: nodes.rank])
        ranks = range(first, first + n_ranks)
        error_files = {rank: Path(scratch) / f"{rank}.json" for rank in ranks}
        # The file that the user named may have changed since it was read, or be a pipe.
        config_path = Path(scratch) / "config.toml"
        config_path.write_text(dump_toml(config), encoding="utf-8")
        program = [*program, str(config_path)]
        environment = {**_environment(store, nodes, counts, logs), **variables}
        followed, is_head = first + min(shown, default=0), nodes.rank == 0
        # A log that all nodes share has the head's.
        show_phase(f"importing PyTorch on each rank, {sum(counts)} in all", is_logged=is_head)
        output = RankOutput(console, logs, followed=followed, shows_warnings=is_head)
        processes = _start(program, environment, error_files, shown=shown, output=output)
        agent = Agent(processes, store, sum(counts), console, is_head=is_head)
        agent.wait(requests, has_others=nodes.count > 1)
        output.finish()
        codes = {rank: code for rank, code in agent.exit_codes().items() if code is not None}
        message = _config_error(error_files, codes)
    received = requests[0] if requests else None
    if exit_codes.BAD_CONFIG in codes.values():
        exit_barrier(store, nodes, requests, READ_SECONDS)
    elif received is None and agent.failure is None and set(codes.values()) == {exit_codes.DONE}:
        exit_barrier(store, nodes, requests, EXIT_BARRIER_SECONDS)
    if logs is not None and nodes.rank == 0:
        _remove_empty_folders([logs, *parents])
    # Only the head shows why.
    verdict = explained(agent.failure, logs) if nodes.rank == 0 else agent.failure
    return End(codes, message, received, verdict)


def _show_waiting(nodes: Nodes, n_ranks: int, mistake: str) -> None:
    """Name what this node waits for, and its ``mistake``, because others may be late."""
    if nodes.count > 1:
        text = f"waiting for {nodes.count} nodes at {nodes.address}:{nodes.port}"
        doubt = f"; with {n_ranks} ranks on each: {'; '.join(mistake.splitlines())}"
        show_phase(text + doubt * bool(mistake))


def _config_error(error_files: Mapping[int, Path], codes: Mapping[int, int]) -> str:
    """Return the first rank's configuration error; "" if there is none."""
    for rank, path in error_files.items():
        if codes.get(rank) == exit_codes.BAD_CONFIG and path.exists():
            # "" if a full disk left no room for it.
            return str(parse_object(path.read_bytes()).get("message", ""))
    return ""


def _failed_rendezvous(nodes: Nodes, error: dist.DistError | PortTaken) -> End:
    reason = first_line(str(error))
    text = f"rendezvous of {nodes.count} nodes failed: {reason}"
    if nodes.rank > 0:  # The head reports it as a failure of the run.
        logger.error("launcher: %s", text)
    return End({}, "", None, FailureReport([text], traceback="", silent=[]))


def _environment(
    store: dist.TCPStore, nodes: Nodes, counts: list[int], logs: Path | None
) -> dict[str, str]:
    """Environment of this node's ranks: torchrun's variables, as far as anything reads them."""
    # NCCL dumps the latest collectives when one of them times out; read with torchfrtrace.
    flight_recorder = {
        "NCCL_DEBUG": "WARN",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": f"{logs}/flight-record-",
    }
    return {
        **({} if logs is None else flight_recorder),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        **os.environ,
        **import_variables(os.environ),
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
    error_files: dict[int, Path],
    *,
    shown: set[int],
    output: RankOutput,
) -> dict[int, subprocess.Popen[bytes]]:
    """Start this node's ranks, each as leader of a process group; return processes by rank."""
    processes = {}
    for local, (rank, path) in enumerate(error_files.items()):
        own = {"RANK": str(rank), "LOCAL_RANK": str(local), "TORCHELASTIC_ERROR_FILE": str(path)}
        out, err = (
            output.open(rank, is_error=is_error, is_shown=local in shown)
            for is_error in (False, True)
        )
        processes[rank] = subprocess.Popen(
            [sys.executable, "-u", *program],
            env=environment | own,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        os.close(out)
        os.close(err)
    output.start()
    return processes


def _make_logs_on_all_nodes(
    store: dist.Store, nodes: Nodes, logs: Path, parents: list[Path]
) -> Path | None:
    """Call ``_make_logs`` on all nodes; raise ``ConfigError`` on all if one cannot create them.

    The others' ranks would wait for its ranks, which it does not start. ``parents``: new folders.
    """
    mistake = ""
    try:
        made = _make_logs(logs)
    except ConfigError as error:
        if nodes.count == 1:
            raise
        mistake, made = str(error), None
    try:
        if nodes.count > 1:
            own = dist.PrefixStore("logs", store)
            rendezvous(own, nodes, RENDEZVOUS_SECONDS, 0, mistake)
    except ConfigError:
        if nodes.rank == 0:
            _remove_empty_folders([logs, *parents])
        raise
    return made


def _make_logs(logs: Path) -> Path | None:
    """Create ``logs`` and its parents, and return it; None, with an alarm, on a full disk.

    Raises ``ConfigError`` if they cannot be created for another reason.
    """
    try:
        make_folder(logs.parent)
        reject_link(logs)
        logs.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise ConfigError([f"job.output_dir: {error}"]) from None
        logger.error("ALARM: the ranks' output is not kept: %s", error)
        return None
    return logs


def _remove_empty_folders(new: list[Path]) -> None:
    """Delete the ``new`` folders, innermost first, if they are empty, as after a rejected start."""
    with suppress(OSError):  # at the first folder that is not empty
        for folder in new:
            folder.rmdir()


class Agent:
    """Supervises this node's ranks: diagnoses failures, forwards signals, kills ranks that hang."""

    def __init__(
        self,
        processes: dict[int, subprocess.Popen[bytes]],
        store: dist.TCPStore,
        world_size: int,
        console: Console,
        *,
        is_head: bool,
    ) -> None:
        self._processes, self._store, self._world_size = processes, store, world_size
        self._is_head = is_head
        self._console, self._is_stop_asked = console, False
        self._n_forwarded, self._deadline = 0, math.inf
        self._is_aborted, self._is_finished = threading.Event(), threading.Event()
        self.failure: FailureReport | None = None

    def exit_codes(self) -> dict[int, int | None]:
        """Exit codes of this node's ranks, None for a running one."""
        return {rank: process.poll() for rank, process in self._processes.items()}

    def wait(self, requests: list[signal.Signals], *, has_others: bool) -> None:
        """Return when all ranks have exited, by themselves or after a failure.

        The first signal in ``requests``, which may grow, is forwarded, so that ranks save and exit.
        The second sends SIGTERM and restarts the time limit. The third kills the ranks.
        """
        listener = threading.Thread(target=self._watch_abort, daemon=True)
        if has_others:
            listener.start()
        signal.signal(signal.SIGTSTP, self._ask_to_stop)
        while self._running() and time.monotonic() < self._deadline and len(requests) < 3:
            if self._is_stop_asked:
                self._stop_until_continued()
            if self._n_forwarded < len(requests):
                self._forward(requests[self._n_forwarded])
            elif self._n_forwarded == 1 and self._is_before_training(requests[0]):
                # The other ranks wait for the one that is dead, so that they cannot save.
                self._deadline = min(self._deadline, time.monotonic() + SHUTDOWN_GRACE_SECONDS)
            elif self._deadline == math.inf:
                self._end_after_failure()
            time.sleep(POLL_SECONDS)
        late = self._running()
        may_save = 0 < len(requests) < 3 and not self._is_before_training(requests[0])
        if late and self._n_forwarded > 0 and may_save:
            text = "launcher: ranks %s did not end within %d s of %s: killed without a save"
            logger.error(text, late, SHUTDOWN_SECONDS, requests[self._n_forwarded - 1].name)
        self._send(signal.SIGKILL, self._processes)
        with suppress(subprocess.TimeoutExpired):
            for process in self._processes.values():
                process.wait(KILL_SECONDS)
        self._diagnose_failure()
        # A store call that returns while Python exits would abort the process. Without a network
        # link the call does not return.
        self._is_finished.set()
        if has_others:
            listener.join(2 * ABORT_POLL_SECONDS)

    def _running(self) -> list[int]:
        return [rank for rank, code in self.exit_codes().items() if code is None]

    def _forward(self, request: signal.Signals) -> None:
        logger.info("launcher: %s, forwarded to the ranks", request.name)
        self._send(signal.SIGTERM if self._n_forwarded else request, self._processes)
        self._n_forwarded += 1
        self._deadline = time.monotonic() + SHUTDOWN_SECONDS

    def _end_after_failure(self) -> None:
        """End the ranks if one has failed, here or on another node, or has exited on purpose."""
        # Before the diagnosis: a rank that fails meanwhile is diagnosed in the next round.
        has_exited = not set(self.exit_codes().values()) <= {None, exit_codes.DONE}
        self._diagnose_failure()
        if has_exited or self.failure is not None:
            self._send(signal.SIGTERM, self._processes)
            self._deadline = time.monotonic() + SHUTDOWN_GRACE_SECONDS

    def _is_before_training(self, forwarded: signal.Signals) -> bool:
        """True if the signal killed a rank, which had no handlers yet."""
        return -forwarded in self.exit_codes().values()

    def _ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        self._is_stop_asked = True

    def _stop_until_continued(self) -> None:
        """Stop the ranks and this process, as Ctrl-Z asks, until the shell continues it."""
        text = (
            "launcher: stopped, with the ranks here; fg or bg continues. Ranks that wait for them"
            " may time out after comm.train_timeout_seconds"
        )
        with self._console.suspended(text):
            self._is_stop_asked = False
            self._send(signal.SIGSTOP, self._processes)
            os.kill(os.getpid(), signal.SIGSTOP)
            self._send(signal.SIGCONT, self._processes)
        logger.info("launcher: continued")

    def _diagnose_failure(self) -> None:
        """After the first failure of a rank, find its cause and kill the ranks that hang.

        Only the head, which alone shows the cause, reads what other nodes' ranks report.
        """
        codes = self.exit_codes()
        is_done = set(codes.values()) <= INTENDED_CODES
        has_failed = not set(codes.values()) <= INTENDED_CODES | {None}
        if self.failure is not None or is_done or not (has_failed or self._is_aborted.is_set()):
            return
        reports: list[FailureReport] = []

        def collect() -> None:
            with suppress(dist.DistError):
                if self._is_head:
                    reports.append(diagnose(self._store, self._world_size, self.exit_codes))
                else:
                    silent = silent_ranks(
                        self._store, self._world_size, list(codes), self.exit_codes
                    )
                    reports.append(FailureReport([], traceback="", silent=silent))

        # Without a network link, a call to the head's store would block for 15 minutes.
        thread = threading.Thread(target=collect, daemon=True)
        thread.start()
        thread.join(STORE_SECONDS)
        lines = ["the launcher of the head node does not answer"]
        unreachable = FailureReport(lines, traceback="", silent=list(codes))
        self.failure = reports[0] if reports else unreachable
        # Ranks that hang do not react to SIGTERM.
        self._send(signal.SIGKILL, self.failure.silent)

    def _watch_abort(self) -> None:
        """Poll for failures on other nodes, because all ranks of this node may just hang."""
        try:
            # A connection serves one thread at a time, so this thread opens its own.
            store = dist.TCPStore(self._store.host, self._store.port, is_master=False)
            while not is_aborted(store):
                if self._is_finished.wait(ABORT_POLL_SECONDS):
                    return
        except dist.DistError:
            # The head has exited. If the run is done, the ranks here exit by themselves.
            self._is_finished.wait(SHUTDOWN_GRACE_SECONDS)
        self._is_aborted.set()

    def _send(self, number: signal.Signals, ranks: Collection[int]) -> None:
        """Send a signal to the process groups of those ``ranks`` that run on this node."""
        for rank, process in self._processes.items():
            if rank in ranks and process.poll() is None:
                with suppress(ProcessLookupError):  # It has just exited.
                    os.killpg(process.pid, number)
