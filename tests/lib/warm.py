"""Programs of this repository that start in a tenth of a second of CPU time instead of four.

A zygote, a process that has imported PyTorch and this repository, forks them. They are children of
the process that starts them, as any others: their own process id, exit code, signals and death with
their parent. Those of a shell are children of a server, and the shell's child is its client. A test
of what happens before a program's first line needs ``subprocess`` instead.
"""

import atexit
import inspect
import json
import os
import platform
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tests.lib.patience import wait_until

ROOT = Path(__file__).absolute().parents[2]
TRAINER, SHARDLOOM = ROOT / "train.py", ROOT / "shardloom.py"
CLIENT = ROOT / "tests" / "lib" / "warm_client.py"
ZYGOTE = "zygote"
"""Its name in ``/proc/PID/comm``, by which tests tell it from a launcher's ranks."""
FLAGS = ("-u", "-P")
# What Python and libraries read while they start: with other values a program starts by itself.
READ_AT_START = ("LD_", "LC_", "LANG", "OMP_", "MKL_", "PYTHON", "TORCH_LOGS", "TORCHINDUCTOR_")
TOLD_APART = ("PYTHON", "PYTHONPATH", "PYTHONSAFEPATH", "TORCHINDUCTOR_CACHE_DIR")
IS_POSSIBLE = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")


@dataclass(frozen=True)
class Program:
    """Command line, environment and folder of a program that a zygote can fork."""

    module: str
    """Module, or path of a script."""
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    path: list[str] = field(default_factory=list)
    """Entries of ``sys.path`` before the standard library's."""
    is_unbuffered: bool = False
    is_session_leader: bool = False

    @property
    def is_rank(self) -> bool:
        return self.module == str(TRAINER)


class WarmPopen(subprocess.Popen[Any]):
    """``subprocess.Popen``, by a zygote where the command is Python on a program of ours."""

    def _execute_child(self, *parameters: Any) -> None:
        execute = super()._execute_child  # type: ignore[misc]
        given = inspect.signature(execute).bind(*parameters).arguments
        program = _program_of_popen(given) if IS_POSSIBLE else None
        if program is None:
            execute(*parameters)
            return
        ends = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        streams = [number if end == -1 else end for number, end in enumerate(ends)]
        self.pid = fork(program, streams)
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in pipes))  # type: ignore[attr-defined]


FORKING_PYTHON = """#!/bin/sh
case "$1" in
  -m | */shardloom.py) exec {python} -ESs {client} {address} "$@" ;;
esac
exec {python} "$@"
"""


def write_forking_python(folder: Path) -> str:
    """Write an interpreter for shells, by which programs of ours start warm; return its path."""
    if not IS_POSSIBLE:
        return sys.executable
    words = {"python": sys.executable, "client": CLIENT, "address": server_address()}
    path = folder / "python"
    path.write_text(FORKING_PYTHON.format(**{k: shlex.quote(str(v)) for k, v in words.items()}))
    path.chmod(0o755)
    return str(path)


@cache
def server_address() -> str:
    """Address of a server for shells, which is started on first use and ends with this process."""
    folder = tempfile.mkdtemp(prefix="warm-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    address = Path(folder, "socket")
    process = WarmPopen(
        [sys.executable, "-m", "tests.lib.warm_server", str(address)],
        env=ENVIRONMENT | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    # Kept, because it ends when its standard input does.
    atexit.register(process.kill)
    wait_until(lambda: address.exists() or process.poll() is not None)
    assert address.exists(), "the server for shells did not start"
    return str(address)


def _program_of_popen(given: Mapping[str, Any]) -> Program | None:
    """Program of Popen's arguments; None if no zygote can fork it."""
    plain = {"preexec_fn": None, "pass_fds": (), "shell": False, "executable": None, "umask": -1}
    plain |= {"gid": None, "gids": None, "uid": None, "process_group": -1}
    command = given["args"]
    if any(given[name] != value for name, value in plain.items()) or isinstance(command, str):
        return None
    executable, *words = map(os.fspath, command)
    if executable != sys.executable:
        return None
    return program_of(
        words,
        environment=dict(os.environ if given["env"] is None else given["env"]),
        folder=os.fspath(given["cwd"] or os.getcwd()),
        is_session_leader=given["start_new_session"],
    )


def program_of(
    words: list[str], environment: dict[str, str], folder: str, *, is_session_leader: bool
) -> Program | None:
    """Program of Python's arguments ``words``; None if no zygote can fork it."""
    words, flags = [*words], []
    while words and words[0] in FLAGS:
        flags.append(words.pop(0))
    entries = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if "-P" not in flags and not environment.get("PYTHONSAFEPATH") and words[:1] == ["-m"]:
        entries.insert(0, folder)
    is_module = words[:1] == ["-m"] and (ROOT / words[1].partition(".")[0]).is_dir()
    if (
        not (is_module or words[:1] in ([str(TRAINER)], [str(SHARDLOOM)]))
        or entries[:1] != [str(ROOT)]
        or read_at_start(environment) != read_at_start(ENVIRONMENT)
    ):
        return None
    module, *arguments = words[is_module:]
    return Program(
        module, arguments, environment, folder, entries, is_unbuffered="-u" in flags,
        is_session_leader=is_session_leader,
    )  # fmt: skip


def read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_AT_START) and name not in TOLD_APART
    }


LOCK = threading.Lock()
# Of this process and of its zygote.
ENVIRONMENT = dict(os.environ)


@cache
def zygote() -> socket.socket:
    """Socket to the zygote of this process, which is started on first use and ends with it."""
    own, other = socket.socketpair()
    with other:
        number = other.fileno()
        subprocess.Popen(
            [sys.executable, "-m", "tests.lib.zygote", str(number)],
            env=ENVIRONMENT | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"},
            pass_fds=[number],
            stdin=subprocess.DEVNULL,
        )
    return own


def fork(program: Program, streams: list[int]) -> int:
    """Fork ``program`` with the descriptors ``streams`` as 0, 1 and 2; return its process id."""
    content = json.dumps(asdict(program)).encode()
    with LOCK:
        socket.send_fds(zygote(), [len(content).to_bytes(8)], streams)
        zygote().sendall(content)
        return int.from_bytes(receive(zygote(), 8))


def receive(connection: socket.socket, count: int) -> bytes:
    """Receive ``count`` bytes; ``EOFError`` if the other end closes before."""
    content = connection.recv(count, socket.MSG_WAITALL)
    if len(content) < count:
        raise EOFError
    return content
