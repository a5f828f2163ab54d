"""Loops that take turns: processes that stand still between steps until it is their turn.

Whatever else the machine does slows all of them alike, so ratios hold where rates do not.
Benchmarks of steps all take their times here.
"""

import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Self

import torch

from metrics.logger import peak_memory_gib
from runtime.compat import find
from runtime.machine import usable_cpus


class Turn(NamedTuple):
    """One turn, over all ranks: the longest time, and the sums of CPU time and memory."""

    seconds: float
    cpu_seconds: float
    peak_gib: float
    compile_seconds: float
    note: Any
    """What rank 0 noted."""


class Turns:
    """The turns as the loop itself sees them, in its own process."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._left, self._begin = connection, 0, (0.0, 0.0)
        self._is_ready = False
        self.note: Any = None
        """Sent along with a turn's measurements; before the first turn, to say that it is ready."""

    def next_step(self) -> None:
        """Call this where a step begins: it ends the one before, and may wait for the next turn."""
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
                # Nobody listens any more, and threads that read ahead would go on for ever.
                os._exit(0)
            self._begin = time.perf_counter(), time.process_time()
        self._left -= 1


def compile_seconds() -> float:
    """Seconds that this process has spent in torch.compile."""
    path = "torch._dynamo.utils:calculate_time_spent"
    # Nothing was compiled where the compiler was not even imported.
    if path.partition(":")[0] not in sys.modules or (spent := find(path)) is None:
        return 0.0
    return float(spent().get("total_wall_time", 0.0))


class LoopError(Exception):
    """A loop failed; the message is its traceback."""

    @property
    def problem(self) -> str:
        """The traceback's last line, short enough for a table."""
        return str(self).strip().splitlines()[-1][:200].replace("|", "/")


class Loop:
    """A loop's processes, one for each rank, seen from outside. As a context, it ends them."""

    def __init__(
        self, work: Callable[..., None], *args: Any, ranks: int = 1, deadline: float
    ) -> None:
        """Start ``work(turns, *args)``, which calls ``turns.next_step()`` for ever, on each rank.

        ``deadline``, on ``time.monotonic()``: after it, every wait raises ``TimeoutError``.
        """
        self._deadline = deadline
        self._processes, self._connections = [], []
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        context = get_context("spawn")
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, ranks, port, work, args)
            process = context.Process(target=_run, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        try:
            self.ready = self._receive()[0]
            """What rank 0 noted before its first step."""
        except BaseException as error:
            self.__exit__(error)
            raise

    def turn(self, steps: int = 1) -> Turn:
        """Let the loop make ``steps``."""
        for connection in self._connections:
            connection.send(steps)
        of_ranks = self._receive()
        seconds, cpu, memory, compiling, _ = zip(*of_ranks, strict=True)
        return Turn(max(seconds), sum(cpu), sum(memory), max(compiling), of_ranks[0].note)

    def _receive(self) -> list[Any]:
        answers = []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(max(0.0, self._deadline - time.monotonic())):
                raise TimeoutError(f"rank {rank} was not done in time")
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


def _run(
    connection: Connection,
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
    torch.set_num_threads(max(1, usable_cpus() // ranks))
    # What loops print is dropped; errors go through the connection.
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        work(Turns(connection), *args)
    except BaseException:
        connection.send(LoopError(traceback.format_exc()))
        os._exit(1)
