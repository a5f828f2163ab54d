"""Meet the launchers of all nodes in the head node's TCPStore, and leave it together."""

import json
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from config import ConfigError
from runtime.machine import raise_open_file_limit
from runtime.printable import first_line

POLL_SECONDS = 0.1
HEAD_POLL_SECONDS = 0.5
# Seconds that a launcher with a wrong configuration waits for others to tell them, and that all
# launchers wait for each other before they exit because of one.
MISTAKE_SECONDS, READ_SECONDS = 30, 5.0
# Key of a store whose launchers of all nodes have met.
HAS_MET = "launchers have met"


class PortTaken(ConfigError):
    """A mistake that a later start may not have."""


@dataclass(frozen=True)
class Nodes:
    """Number of nodes, this node's rank, and the address of the head node's store."""

    count: int
    rank: int
    address: str
    port: int


def open_store(nodes: Nodes, seconds: int) -> dist.TCPStore:
    """Connect to the TCPStore of ranks and launchers, which the head node's launcher serves.

    Raises ``ConfigError`` on the head node if it cannot listen on the port.
    """
    address, port, listener = nodes.address, nodes.port, None
    if nodes.rank > 0:
        _wait_for_head(nodes, seconds)
    else:
        # Every rank and every launcher opens two connections to the store.
        raise_open_file_limit()
    if nodes.count == 1:
        # By default the store would listen on all interfaces.
        server = socket.create_server(("127.0.0.1", 0))
        (address, port), listener = server.getsockname(), server.detach()
    try:
        return dist.TCPStore(
            address,
            port,
            is_master=nodes.rank == 0,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener,
        )
    except dist.DistNetworkError as error:
        if "failed to listen" not in str(error):
            raise
        reason = first_line(str(error)).rpartition("message: ")[2]
        text = f"MASTER_PORT={port}: cannot listen on this port: {reason}; set another"
        raise PortTaken([text]) from None


def _wait_for_head(nodes: Nodes, seconds: float) -> None:
    """Return when the head node listens; TCPStore, which waits too, would not return for Ctrl-C.

    Raises ``dist.DistNetworkError`` if it does not within ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            left = max(POLL_SECONDS, deadline - time.monotonic())
            socket.create_connection((nodes.address, nodes.port), left).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                reason = f"{error.strerror or error} for {seconds} s"
                raise dist.DistNetworkError(reason) from None
        time.sleep(HEAD_POLL_SECONDS)


def rendezvous(
    store: dist.Store, nodes: Nodes, seconds: float, n_ranks: int, mistake: str
) -> tuple[list[int], str]:
    """Wait for the launchers of all nodes; return the ranks of each, and the head's start time.

    Raises ``ConfigError`` if any node has a ``mistake``. One of a node with ranks counts only if
    all nodes have as many. Raises ``dist.DistError`` if a launcher does not come, or if the head
    has met those of all nodes before.
    """
    if store.check([HAS_MET]):
        where = f"{nodes.address}:{nodes.port}"
        text = f"{where} has all its nodes: another job has MASTER_PORT, or another node NODE_RANK"
        raise dist.DistStoreError(f"{text} {nodes.rank}")
    text = f"node {nodes.rank} ({socket.gethostname()}): {mistake}" if mistake else ""
    own = [n_ranks, time.strftime("%Y%m%d-%H%M%S"), text]
    keys = [f"launcher/{node}" for node in range(nodes.count)]
    store.set(keys[nodes.rank], json.dumps(own))
    deadline = time.monotonic() + seconds
    # A call that waits would not return for Ctrl-C.
    while not store.check(keys):
        if time.monotonic() > deadline:
            missing = [str(node) for node, key in enumerate(keys) if not store.check([key])]
            who = f"node{'s' * (len(missing) > 1)} {', '.join(missing)}"
            raise dist.DistStoreError(f"{who} did not join within {seconds} s")
        time.sleep(POLL_SECONDS)
    store.set(HAS_MET, "")
    entries = [json.loads(store.get(key)) for key in keys]
    counts = [count for count, *_ in entries]
    are_equal = len(set(counts)) == 1
    if mistakes := [text for count, _, text in entries if text and (are_equal or count == 0)]:
        exit_barrier(store, nodes, [], READ_SECONDS)
        raise ConfigError(mistakes)
    return counts, entries[0][1]


def end_other_nodes(nodes: Nodes, mistake: str) -> None:
    """Report the user's ``mistake`` on this node to other launchers, which would wait for it.

    Waits at most ``MISTAKE_SECONDS`` for them.
    """
    if nodes.count > 1:
        with suppress(dist.DistError, ConfigError):
            store = open_store(nodes, MISTAKE_SECONDS)
            rendezvous(store, nodes, MISTAKE_SECONDS, 0, mistake)


def exit_barrier(
    store: dist.Store, nodes: Nodes, requests: list[signal.Signals], seconds: float
) -> None:
    """Wait until all nodes are done. The head node serves the store, so it exits last."""
    deadline = time.monotonic() + seconds
    expected = nodes.count if nodes.rank > 0 else 2 * nodes.count - 1
    with suppress(dist.DistError):
        count = store.add("launcher/done", 1)
        while count < expected and not requests and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            count = store.add("launcher/done", 0)
        # Every node but the head counts twice: when it is done, and when it exits.
        store.add("launcher/done", 1)
