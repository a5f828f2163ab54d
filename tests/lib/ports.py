"""Ports for servers that start later."""

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

# Locked by the processes that were given a port, until they end.
FOLDER = Path(tempfile.gettempdir()) / f"shardloom-test-ports-{os.getuid()}"


def free_port() -> int:
    """Return a port on which nothing listens, and which no other test was given.

    It is not one of the kernel's free ports, which begin at 32768 on Linux: until the server
    listens, a connection of another test could be given one. Nor is it one of a Slurm job, which
    are from 20000 on.
    """
    FOLDER.mkdir(exist_ok=True)
    while True:
        port = random.SystemRandom().randrange(10000, 20000)
        lock = os.open(FOLDER / str(port), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # As c10d's store does, on all interfaces.
            socket.create_server(("", port)).close()
        except OSError:
            os.close(lock)
            continue
        return port
