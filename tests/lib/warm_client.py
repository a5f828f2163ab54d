"""Python for shells: run a program that ``tests/lib/warm_server.py`` forks, and end as it does.

    python warm_client.py ADDRESS [arguments of Python]

Passes signals on. Runs Python itself if the server cannot fork that program.
"""

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

SIGNALS = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGCONT", "SIGWINCH")


def main(address: str, *words: str) -> None:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    request = {"words": words, "environment": dict(os.environ), "folder": os.getcwd()}
    content = json.dumps(request).encode()
    socket.send_fds(connection, [len(content).to_bytes(8, "big")], [0, 1, 2])
    connection.sendall(content)
    pid = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big")
    if pid == 0:
        os.execv(sys.executable, [sys.executable, *words])

    def pass_on(number: int, frame: Any) -> None:
        with suppress(ProcessLookupError):  # It has just ended.
            os.kill(pid, number)

    for name in SIGNALS:
        signal.signal(getattr(signal, name), pass_on)
    end = connection.recv(8, socket.MSG_WAITALL)
    code = os.waitstatus_to_exitcode(int.from_bytes(end, "big")) if end else 1
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main(*sys.argv[1:])
