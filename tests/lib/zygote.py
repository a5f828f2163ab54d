"""Process of ``tests/lib/warm.py`` that has imported what programs import, and forks them.

Programs that start others, as the launcher starts ranks, have zygotes of their own: so each process
is a child of the one that started it.

    python -m tests.lib.zygote DESCRIPTOR     for the process at the other end of a socket
"""

import atexit
import ctypes
import gc
import io
import json
import os
import platform
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from importlib import import_module  # noqa: TID251
from typing import NoReturn

from data.text_files import builtin_files
from tests.lib import warm
from tests.lib.warm import ZYGOTE, Program, WarmPopen, program_of, receive

SYS_CLONE = {"x86_64": 56, "aarch64": 220}[platform.machine()]
CLONE_PARENT = 0x8000
PR_SET_NAME = 15
# Those of tests and ranks, what compilations and pipelines import besides, and half of the time
# that ``datasets`` takes. The other half, huggingface_hub, reads its variables when it is imported.
PROGRAMS = (
    "tests.lib.forked",
    "tests.lib.warm_server",
    "pandas",
    "launcher.launch",
    "tools.convert",
    "tools.generate",
    "tools.plan",
    "tools.preflight",
    "tools.preflight_rank",
    "tools.slurm_begin",
)
POPEN, EXECVE = subprocess.Popen, os.execve


def serve(connection: socket.socket) -> Program:
    """Fork programs; return in each of them. Exits when nobody has the other end."""
    _set_name(ZYGOTE)
    # They are for this process's parent and its children, not for the zygote of them.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        try:
            header, streams, _, _ = socket.recv_fds(connection, 8, maxfds=3)
            if not header:
                raise EOFError
            content = receive(connection, int.from_bytes(header))
        except (EOFError, ConnectionError):
            os._exit(0)
        if (pid := _fork_sibling()) == 0:
            connection.close()
            for number, descriptor in enumerate(streams):
                os.dup2(descriptor, number)
                os.close(descriptor)
            return Program(**json.loads(content))
        for descriptor in streams:
            os.close(descriptor)
        connection.sendall(pid.to_bytes(8))


def leave(code: int) -> NoReturn:
    """Exit as Python does, but do not free what was imported: that takes a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _fork_sibling() -> int:
    """``os.fork`` of a child of this process's parent."""
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    # PyDLL, because the child must hold the interpreter's lock.
    pid = int(ctypes.PyDLL(None).syscall(SYS_CLONE, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return pid


def _set_name(name: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


def become(program: Program) -> None:
    """Take over the state that Python has at the first line of ``program``."""
    if program.is_session_leader:
        os.setsid()
    _set_name("python")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    os.chdir(program.folder)
    os.environ.clear()
    os.environ.update(program.environment)
    sys.argv = [program.module, *program.arguments]
    own = set(program.path) | {str(warm.ROOT), ""}
    sys.path[:] = [*program.path, *(entry for entry in sys.path if entry not in own)]
    tempfile.tempdir = None
    for name, number in (("stdout", 1), ("stderr", 2)):
        setattr(sys, name, _stream(getattr(sys, f"__{name}__"), number, program.is_unbuffered))
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))


def _stream(like: io.TextIOWrapper, number: int, is_unbuffered: bool) -> io.TextIOWrapper:
    buffering = 0 if is_unbuffered else -1
    return io.TextIOWrapper(
        open(number, "wb", buffering, closefd=False),
        encoding=like.encoding,
        errors=like.errors,
        line_buffering=number == 2 or os.isatty(number),
        write_through=is_unbuffered,
    )


def give_zygote() -> Program | None:
    """Fork a zygote for what this process starts; return in that, too, with its program."""
    own, other = socket.socketpair()
    if os.fork() == 0:
        own.close()
        # Readers of this process's output wait until nobody can write to it.
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nowhere, number)
        os.close(nowhere)
        return serve(other)
    other.close()
    warm.zygote = lambda: own  # type: ignore[assignment]
    subprocess.Popen = WarmPopen  # type: ignore[misc]
    return None


def main(descriptor: str) -> None:
    for name in PROGRAMS:
        import_module(name)
    assert "huggingface_hub" not in sys.modules, "programs have other HF_ variables"
    # They are kept, for all that is forked.
    builtin_files()
    gc.freeze()
    perform(serve(socket.socket(fileno=int(descriptor))))


def perform(program: Program) -> NoReturn:
    """Run ``program`` in the place of this process."""
    become(program)
    os.execve = _execve
    subprocess.Popen = POPEN  # type: ignore[misc]
    if not program.is_rank and (started := give_zygote()) is not None:
        program = started
        become(program)
        subprocess.Popen = POPEN  # type: ignore[misc]
    leave(run(program))


def _execve(path: str, words: list[str], environment: dict[str, str]) -> NoReturn:
    """``os.execve``; a program of ours runs in this process, without another Python."""
    program = None
    if path == sys.executable:
        program = program_of(words[1:], environment, os.getcwd(), is_session_leader=False)
    if program is None:
        EXECVE(path, words, environment)
    perform(program)


def run(program: Program) -> int:
    """Run ``program``; return its exit code, if it does not exit by itself."""
    try:
        if os.sep in program.module:
            runpy.run_path(program.module, run_name="__main__")
        else:
            sys.modules.pop(program.module, None)
            runpy.run_module(program.module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, int | None):
            return end.code or 0
        raise
    except Exception:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


if __name__ == "__main__":
    main(*sys.argv[1:])
