"""Ports for servers that start later."""

import random
import socket


def free_port() -> int:
    """Return a port on which nothing listens.

    It is not one of the kernel's free ports, which begin at 32768 on Linux: until the server
    listens, a connection of another test could be given one.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
