"""Run a function on N ranks: real processes with gloo groups, kept alive between tests.

The processes are forked from one that has imported torch, because that import takes longer than
most tests. Every call creates its own process group; a call that fails or hangs closes the pool.
"""

import gc
import os
import pkgutil
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from runtime.compat import limit_gloo_to_one_thread
from runtime.machine import disable_malloc_trim, schedule_as_batch
from tests.lib.patience import PATIENCE_SECONDS
from tests.lib.settings import restored_settings

GROUP_TIMEOUT = timedelta(seconds=PATIENCE_SECONDS)
# What calls leave behind, such as compiled graphs, goes with the processes.
CALLS_PER_POOL = 100
# Modules of the process that ranks are forked from: one for all tests of a session. Ranks that read
# JSON or CSV files import the second, which takes half a second of CPU time.
PRELOADED = ["tests.lib.forked", "data.hub"]
# Functions of DTensor that clear caches with meshes; some releases lack the others.
CACHES = (
    "torch.distributed.tensor.debug:_clear_sharding_prop_cache",
    "torch.distributed.tensor._redistribute:clear_redistribute_planner_cache",
    "torch.distributed.tensor._redistribute:_gen_transform_infos.cache_clear",
    "torch.distributed.tensor._collective_utils:MeshTopoInfo.build_from_mesh.cache_clear",
)
ALL_ANSWERED = "all ranks have answered"


class RankError(AssertionError):
    """Failure of a rank; the message is its traceback."""


class RankPool:
    """Pool of rank processes, started on demand."""

    def __init__(self) -> None:
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._calls = 0

    def run(self, function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        """Run ``function(*args)`` on each rank of a new group; return the results by rank.

        Raises ``RankError`` if a rank fails or does not answer.
        """
        self._calls += 1
        if self._calls % CALLS_PER_POOL == 0:
            self.close()
        while len(self._workers) < world_size:
            self._workers.append(_start_worker())
        connections = [connection for _, connection in self._workers[:world_size]]
        with tempfile.TemporaryDirectory() as folder:
            store = os.path.join(folder, "store")
            for rank, connection in enumerate(connections):
                connection.send((function, rank, world_size, store, args))
            results: dict[int, Any] = {}
            failures: dict[int, str] = {}
            while len(results) + len(failures) < world_size:
                waiting = [c for r, c in enumerate(connections) if r not in results | failures]
                ready = wait(waiting, timeout=2 * GROUP_TIMEOUT.total_seconds())
                if not ready:
                    failures |= {r: "no answer" for r in range(world_size) if r not in results}
                for connection in ready:
                    rank = connections.index(connection)
                    _collect(connection, rank, results, failures)
                if failures:
                    # Other ranks would wait for the failed one until the timeout.
                    self.close()
                    raise RankError("\n".join(f"rank {r}: {text}" for r, text in failures.items()))
        for connection in connections:
            connection.send(ALL_ANSWERED)
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        for process, _ in self._workers:
            process.kill()
            process.join()
        self._workers = []


def _collect(
    connection: Connection, rank: int, results: dict[int, Any], failures: dict[int, str]
) -> None:
    try:
        is_ok, answer = connection.recv()
    except EOFError:
        is_ok, answer = False, "the process died"
    (results if is_ok else failures)[rank] = answer


def _start_worker() -> tuple[BaseProcess, Connection]:
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    parent_end, child_end = context.Pipe()
    process = context.Process(target=_serve, args=(child_end,), daemon=True)
    process.start()
    child_end.close()
    return process, parent_end


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    limit_gloo_to_one_thread()
    schedule_as_batch()
    clear_caches = list(_found(CACHES))
    gc.disable()  # as in train.py
    disable_malloc_trim()
    while True:
        try:
            function, rank, world_size, store, args = connection.recv()
        except EOFError:
            return
        try:
            has_gpu = torch.cuda.is_available()
            if has_gpu:
                torch.cuda.set_device(rank % torch.cuda.device_count())
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if has_gpu else "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                timeout=GROUP_TIMEOUT,
            )
            with restored_settings():
                result = function(*args)
            # Free models, which keep process groups and their threads alive in reference cycles.
            # DTensor caches meshes by equality, so the next call would reuse a stale one.
            for clear in clear_caches:
                clear()
            gc.collect()
            # What is left is cached; later collections skip it.
            gc.freeze()
        except BaseException:
            connection.send((False, traceback.format_exc()))
            continue
        connection.send((True, result))
        # A rank that leaves the group first closes connections that another may still set up.
        connection.recv()
        dist.destroy_process_group()


def _found(paths: Iterable[str]) -> Iterator[Callable[[], object]]:
    for path in paths:
        with suppress(ImportError, AttributeError):
            yield pkgutil.resolve_name(path)
