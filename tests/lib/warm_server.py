"""Server that forks programs for shells, whose ``python`` is ``tests/lib/warm_client.py``.

    python -m tests.lib.warm_server ADDRESS

A program has its client's arguments, environment, folder and streams, and its namespaces of the
network, host name and mounts. It is this server's child: signals reach it through the client, which
ends as it does; if the client is killed, so is the program. The server ends when its standard input
does, and with it all programs.
"""

import ctypes
import json
import os
import selectors
import signal
import socket
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass

from runtime.signals import die_with_parent
from tests.lib import zygote
from tests.lib.warm import Program, program_of, receive

NAMESPACES = ("net", "uts", "mnt")


@dataclass(frozen=True)
class Child:
    pid: int
    pidfd: int
    client: socket.socket


class Server:
    """Socket and all that is forked; ``serve`` returns in each child, with its program."""

    def __init__(self, address: str) -> None:
        self._poll = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(socket.SOMAXCONN)
        self._poll.register(self._listener, selectors.EVENT_READ)
        self._poll.register(sys.stdin.fileno(), selectors.EVENT_READ)

    def serve(self) -> Program:
        while True:
            # One at a time, because it may end another.
            key, _ = self._poll.select()[0]
            if key.fileobj is self._listener:
                if (program := self._accept()) is not None:
                    return program
            elif key.data is None:
                os._exit(0)
            elif key.fd == key.data.pidfd:
                self._report_end(key.data)
            else:
                # Its pidfd is ready next.
                os.kill(key.data.pid, signal.SIGKILL)
                self._poll.unregister(key.data.client)

    def _accept(self) -> Program | None:
        """Fork for the next client; return its program in the child, else None."""
        client, _ = self._listener.accept()
        streams: list[int] = []
        try:
            header, streams, _, _ = socket.recv_fds(client, 8, maxfds=3)
            request = json.loads(receive(client, int.from_bytes(header)))
        except (OSError, EOFError, json.JSONDecodeError):  # It was killed meanwhile.
            program, pid = None, 0
        else:
            program, server = program_of(**request, is_session_leader=True), os.getpid()
            pid = 0 if program is None else os.fork()
        if pid == 0 and program is not None:
            die_with_parent(server)
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            _join_namespaces(_process_of(client))
            self._close(client)
            return program
        for stream in streams:
            os.close(stream)
        # If it was killed, the next event of the socket is its end.
        with suppress(OSError):
            client.sendall(pid.to_bytes(8))
        if program is not None:
            child = Child(pid, os.pidfd_open(pid), client)
            for end in (child.pidfd, child.client):
                self._poll.register(end, selectors.EVENT_READ, child)
        return None

    def _close(self, client: socket.socket) -> None:
        client.close()
        self._listener.close()
        children = {key.data for key in self._poll.get_map().values() if key.data is not None}
        for child in children:
            child.client.close()
            os.close(child.pidfd)
        self._poll.close()

    def _report_end(self, child: Child) -> None:
        _, status = os.waitpid(child.pid, 0)
        with suppress(OSError):
            child.client.sendall(status.to_bytes(8))
        self._poll.unregister(child.pidfd)
        with suppress(KeyError):
            self._poll.unregister(child.client)
        os.close(child.pidfd)
        child.client.close()


def _process_of(client: socket.socket) -> int:
    credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, _, _ = struct.unpack("3i", credentials)
    return int(pid)


def _join_namespaces(pid: int) -> None:
    """Enter those of process ``pid`` that this process is not in."""
    setns = ctypes.CDLL(None, use_errno=True).setns
    own, others = (
        [f"/proc/{process}/ns/{name}" for name in NAMESPACES] for process in ("self", pid)
    )
    pairs = zip(own, others, strict=True)
    entered = [other for mine, other in pairs if os.readlink(mine) != os.readlink(other)]
    # Opened first, because /proc may be another one after the last.
    for number in [os.open(path, os.O_RDONLY) for path in entered]:
        if setns(number, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(number)


if __name__ == "__main__":
    zygote.perform(Server(sys.argv[1]).serve())
