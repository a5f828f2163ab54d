"""Nodes as real launchers on one machine."""

import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.lib.launch import start
from tests.lib.patience import PATIENCE_SECONDS
from tests.lib.ports import free_port
from tests.lib.repository import ROOT, python_files

HOST = socket.gethostname()
DIFFERENCE = re.compile(
    rf"^(.+) must be equal on all ranks: (.+) on rank 0 \({HOST}\), (.+) on rank 1 \({HOST}\)$",
    re.MULTILINE,
)
QUICK = {"training.steps": "1", "validation.enable": "false"}


def run_nodes(
    folder: Path, nodes: list[Mapping[str, Any]], *, is_warm: bool = True
) -> tuple[list[int], list[str]]:
    """Run a launcher with one rank for each of ``nodes``, keywords of ``start``.

    Returns their exit codes and outputs. ``is_warm``: as that of ``start``; of all nodes, because
    ranks compare the packages that they have imported.
    """
    port = free_port()
    processes: list[subprocess.Popen[str]] = []
    try:
        for number, node in enumerate(nodes):
            environment = {
                "NNODES": str(len(nodes)),
                "NODE_RANK": str(number),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                **node.get("environment", {}),
            }
            keys = QUICK | node | {"environment": environment}
            processes.append(start(folder, 1, is_warm=is_warm, **keys))
        outputs = [process.communicate(timeout=PATIENCE_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [process.returncode for process in processes], outputs


SCRIPTS = [Path("run_train.sh"), Path("shardloom"), Path("tools/find_python.sh")]


def copy_repository(to: Path, changed: str | None = "optim/loss.py") -> Path:
    """Copy what a run needs, and append a comment to the file ``changed``."""
    for path in [*python_files(), *SCRIPTS]:
        (to / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, to / path)
    shutil.copytree(ROOT / "train_configs", to / "train_configs")
    shutil.copy(ROOT / "pyproject.toml", to)
    if changed is not None:
        with (to / changed).open("a") as file:
            file.write("# changed\n")
    return to
