"""Check the nodes before a run: ``shardloom preflight CONFIG [--section.key value ...]``

Start it once per node, in the environment of ``run_train.sh``. Prints a
table and one line for each problem, with the node or rank; does not change the run. Exits with 0 if
all checks pass, 1 if one fails, and 2 if the configuration is wrong.

Nodes wait for each other for comm.init_timeout_seconds; a rank that does not answer within
comm.train_timeout_seconds is reported. Small values are fine here.
"""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from config import ConfigError, load_config
from launcher.agent import run_ranks
from launcher.console import Console, PlainScreen
from launcher.launch import check_run, find_nodes, ranks_per_node, set_thread_defaults
from launcher.rendezvous import Nodes, open_store
from runtime import exit_codes
from runtime.hub_paths import pin_names
from runtime.log import report, say
from runtime.printable import first_line
from tools.preflight_rank import HAS_FINDINGS

PROGRAM = ["-m", "tools.preflight_rank"]
POLL_SECONDS = 0.1
SHUTDOWN_GRACE_SECONDS = 5.0


def main(arguments: list[str], environment: Mapping[str, str]) -> int:
    """Check all nodes; return the exit code. Must run on every node."""
    if not arguments or arguments[0] in ("--help", "-h"):
        print(__doc__, file=sys.stderr)
        return exit_codes.DONE if arguments else exit_codes.BAD_CONFIG
    try:
        config = pin_names(load_config(Path(arguments[0]), arguments[1:]))
        n_ranks, nodes = ranks_per_node(environment), find_nodes(environment)
        # What is "auto" makes no difference here.
        config = check_run(config, n_ranks, nodes.count)
    except ValueError as error:
        report(error)
        return exit_codes.BAD_CONFIG
    seconds = config.comm.init_timeout_seconds
    if nodes.count > 1:
        try:
            store = open_store(nodes, seconds)
            findings = meet(store, nodes, n_ranks=n_ranks, seconds=seconds)
        except ConfigError as error:
            report(error)
            return exit_codes.BAD_CONFIG
        except dist.DistError as error:
            reason = first_line(str(error))
            where = f"{nodes.address}:{nodes.port}"
            findings = [f"node {nodes.rank}: no answer from node 0 at {where}: {reason}"]
        if findings:
            say(*findings, file=sys.stderr)
            return exit_codes.FAILED
    set_thread_defaults(n_ranks)
    with Console(PlainScreen()) as console:
        end = run_ranks(PROGRAM, config, n_ranks=n_ranks, nodes=nodes, shown={0}, console=console)
    if end.signal is not None:
        # As a shell says it. A preemption is no finding: the job is requeued.
        return 128 + end.signal
    codes = set(end.codes.values())
    if exit_codes.BAD_CONFIG in codes:
        return exit_codes.BAD_CONFIG
    if HAS_FINDINGS in codes or codes == {exit_codes.DONE}:
        return exit_codes.FAILED if HAS_FINDINGS in codes else exit_codes.DONE
    if nodes.rank == 0:
        lines = [f"exit codes by rank: {end.codes}"] if end.verdict is None else end.verdict.lines
        say("preflight: ranks failed:", *(f"  {line}" for line in lines), file=sys.stderr)
    return exit_codes.FAILED


def meet(store: dist.Store, nodes: Nodes, *, n_ranks: int, seconds: float) -> list[str]:
    """Wait up to ``seconds`` for all nodes; return the same findings on every node that joined."""
    store = dist.PrefixStore("preflight", store)
    arrival = store.add(f"joined/{nodes.rank}", 1)
    store.set(f"node/{nodes.rank}/{arrival}", json.dumps([socket.gethostname(), n_ranks]))
    if nodes.rank > 0 or arrival > 1:
        # Twice as long, because node 0 may have started to wait later.
        store.wait(["findings"], timedelta(seconds=2 * seconds))
        findings = json.loads(store.get("findings"))
        store.add("acknowledged", 1)
        return findings
    deadline = time.monotonic() + seconds
    firsts = [f"node/{rank}/1" for rank in range(nodes.count)]
    while not store.check(firsts) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    joined = {rank: store.add(f"joined/{rank}", 0) for rank in range(nodes.count)}
    hosts: dict[int, list[str]] = {}
    counts: dict[int, int] = {}
    for rank, number in joined.items():
        for arrival in range(1, number + 1):
            host, counts[rank] = json.loads(store.get(f"node/{rank}/{arrival}"))
            hosts.setdefault(rank, []).append(host)
    findings = [
        f"node {rank} did not join within {seconds:.0f} s" for rank in joined if rank not in hosts
    ]
    findings += [
        f"node {rank}: {len(names)} launchers have this NODE_RANK: {', '.join(names)}"
        for rank, names in hosts.items()
        if len(names) > 1
    ]
    findings += [
        f"node {rank} ({hosts[rank][0]}) has {count} ranks, but node 0 has {n_ranks}"
        for rank, count in counts.items()
        if count != n_ranks
    ]
    if len(hosts) < nodes.count:
        present = ", ".join(f"{rank} ({names[0]})" for rank, names in hosts.items())
        findings.append(f"nodes that joined: {present}")
    store.set("findings", json.dumps(findings))
    # The store ends with this process, so wait until all nodes have read the findings.
    deadline = time.monotonic() + SHUTDOWN_GRACE_SECONDS
    while store.add("acknowledged", 0) < sum(joined.values()) - 1 and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return findings


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:], os.environ))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
