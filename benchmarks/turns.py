"""Interleaved loops: processes that block between steps until the parent gives them a turn.

Load on the machine slows all loops alike, so ratios are stable where rates are not. All benchmarks
of steps are timed here.
"""

import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import get_context, set_start_method
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Self

import torch

from metrics.logger import peak_memory_gib
from runtime.compat import find
from runtime.machine import available_cpus


class Turn(NamedTuple):
    """Measurements of one turn over all ranks: maximal time, sums of CPU time and memory."""

    seconds: float
    cpu_seconds: float
    peak_gib: float
    compile_seconds: float
    note: Any
    """``Turns.note`` of rank 0."""


class Turns:
    """Turns as seen by the loop in its own process."""

    def __init__(self, connection: Connection, folder: str) -> None:
        self._connection, self._left, self._begin = connection, 0, (0.0, 0.0)
        self.folder = folder
        """Of all ranks of the loop; deleted with it."""
        self._is_ready = False
        self.note: Any = None
        """Any value, sent with the measurements of a turn and once when the loop is ready."""

    def next_step(self) -> None:
        """Mark the start of a step; at the end of a turn, send its times and wait for the next."""
        if self._left == 0:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds = time.perf_counter() - self._begin[0]
            cpu = time.process_time() - self._begin[1]
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            turn = Turn(seconds, cpu, peak_memory_gib(device), compile_seconds(), self.note)
            self._connection.send(turn if self._is_ready else self.note)
            self._is_ready = True
            try:
                self._left = self._connection.recv()
            except EOFError:
                # The parent is gone; prefetch threads would keep this process alive.
                os._exit(0)
            self._begin = time.perf_counter(), time.process_time()
        self._left -= 1


def compile_seconds() -> float:
    """Seconds that this process spent in torch.compile."""
    path = "torch._dynamo.utils:calculate_time_spent"
    # If the compiler is not imported, nothing was compiled.
    if path.partition(":")[0] not in sys.modules or (spent := find(path)) is None:
        return 0.0
    return float(spent().get("total_wall_time", 0.0))


class LoopError(Exception):
    """Failure of a loop; the message is its traceback."""

    @property
    def problem(self) -> str:
        """Last line of the traceback, shortened for a table."""
        return str(self).strip().splitlines()[-1][:200].replace("|", "/")


class Loop:
    """Handle of a loop's processes, one per rank; a context manager that stops them."""

    def __init__(
        self, work: Callable[..., None], *args: Any, ranks: int = 1, deadline: float
    ) -> None:
        """Start ``work(turns, *args)`` on each rank; it calls ``turns.next_step()`` in a loop.

        After ``deadline`` (``time.monotonic()``) every wait raises ``TimeoutError``.
        """
        self._deadline = deadline
        self._processes, self._connections = [], []
        self._folder = tempfile.TemporaryDirectory()
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        context = get_context("spawn")
        for rank in range(ranks):
            parent_end, child_end = context.Pipe()
            arguments = (child_end, self._folder.name, rank, ranks, port, work, args)
            process = context.Process(target=_run, args=arguments, daemon=True)
            process.start()
            child_end.close()
            self._processes.append(process)
            self._connections.append(parent_end)
        try:
            self.ready = self._receive()[0]
            """``Turns.note`` of rank 0 before its first step."""
        except BaseException as error:
            self.__exit__(error)
            raise

    def turn(self, steps: int = 1) -> Turn:
        """Run ``steps`` steps; return their measurements."""
        for connection in self._connections:
            connection.send(steps)
        by_rank = self._receive()
        seconds, cpu, memory, compiling, _ = zip(*by_rank, strict=True)
        return Turn(max(seconds), sum(cpu), sum(memory), max(compiling), by_rank[0].note)

    def _receive(self) -> list[Any]:
        answers = []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(max(0.0, self._deadline - time.monotonic())):
                raise TimeoutError(f"rank {rank}: timed out")
            try:
                answers.append(connection.recv())
            except EOFError:
                raise LoopError(f"rank {rank}: the process died") from None
            if isinstance(answers[-1], LoopError):
                raise answers[-1]
        return answers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for process, connection in zip(self._processes, self._connections, strict=True):
            connection.close()
            if error[0] is not None:
                process.kill()
        for process in self._processes:
            process.join(10)
            process.kill()
            process.join()
        self._folder.cleanup()


def _run(
    connection: Connection,
    folder: str,
    rank: int,
    ranks: int,
    port: int,
    work: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    if ranks > 1:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ |= {name: str(value) for name, value in names.items()}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    # Locks of spawned processes, such as tqdm's, are files that outlive ``os._exit``.
    set_start_method("fork", force=True)
    torch.set_num_threads(max(1, available_cpus() // ranks))
    # Drop the output of loops; errors go through the connection.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    try:
        work(Turns(connection, folder), *args)
    except BaseException:
        connection.send(LoopError(traceback.format_exc()))
        os._exit(1)
