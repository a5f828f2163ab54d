"""Preflight with planted faults: ``python -m tests.tools.planted_preflight launch CONFIG ...``

The environment variable PLANTED names the faults of this node's ranks.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tests.lib.patience import PATIENCE_SECONDS
from tools import preflight, preflight_rank, preflight_speed

# Times as slow as without the fault, on a busy machine too.
SLOWDOWN = 50


def other_versions() -> None:
    original = preflight_rank.node_environment
    preflight_rank.node_environment = lambda: original() | {"package torch": "0.4.1"}


def wrong_clock() -> None:
    preflight_rank.wall_clock = lambda: time.time() + 5.0


def other_folder() -> None:
    preflight_rank.nearest = lambda folder: Path(os.environ["OTHER_FOLDER"])


def slowly(act: Callable[[], object]) -> None:
    begin = time.perf_counter()
    act()
    time.sleep((SLOWDOWN - 1) * (time.perf_counter() - begin))


def slow_matmul() -> None:
    original = preflight_rank.matmul_speed

    def matmul_speed(device: torch.device) -> float:
        best, preflight_speed.best_seconds = preflight_speed.best_seconds, slowed
        try:
            return original(device)
        finally:
            preflight_speed.best_seconds = best

    best_seconds = preflight_speed.best_seconds

    def slowed(act: Callable[[], object], device: torch.device, repeats: int) -> float:
        return best_seconds(lambda: slowly(act), device)

    preflight_rank.matmul_speed = matmul_speed


def slow_link() -> None:
    original = preflight_speed.exchange

    def exchange(*args: object) -> None:
        slowly(lambda: original(*args))

    preflight_speed.exchange = exchange


def hangs() -> None:
    def matmul_speed(device: torch.device) -> float:
        os.kill(os.getpid(), signal.SIGSTOP)
        return 0.0

    preflight_rank.matmul_speed = matmul_speed


def preempted() -> None:
    def matmul_speed(device: torch.device) -> float:
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(PATIENCE_SECONDS)
        return 0.0

    preflight_rank.matmul_speed = matmul_speed


FAULTS = {
    f.__name__: f
    for f in (other_versions, wrong_clock, other_folder, slow_matmul, slow_link, hangs, preempted)
}


if __name__ == "__main__":
    # Processes of other tests may slow one rank down, but less than these bounds.
    preflight_rank.SLOW, preflight_speed.REPEATS = 0.1, 3
    preflight_rank.VISIBLE_SECONDS = preflight.SHUTDOWN_GRACE_SECONDS = 1.0
    if sys.argv[1] == "launch":
        preflight.PROGRAM = ["-m", "tests.tools.planted_preflight", "rank"]
        code = preflight.main(sys.argv[2:], os.environ)
        # A thread still in the store while Python shuts down would abort this process.
        assert code or threading.active_count() == 1, threading.enumerate()
        sys.exit(code)
    for name in os.environ.get("PLANTED", "").split():
        FAULTS[name]()
    sys.exit(preflight_rank.main(sys.argv[2:]))
