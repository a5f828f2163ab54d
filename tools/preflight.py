"""Check the nodes before a run: ``python -m tools.preflight CONFIG [--section.key value ...]``

Started once per node, in the environment and with the arguments of ``run_train.sh``. Prints a table
and a line for each thing that is wrong, with the node or rank; changes nothing of the run. Exits
with 0 if all is well, 1 if something is wrong, and 2 if the configuration is.

comm.init_timeout_seconds is how long nodes wait for each other; a rank that does not answer within
comm.train_timeout_seconds is named. Both may be small here.
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

from config import load_config
from runtime import exit_codes
from tools.agent import Nodes, open_store, run_ranks
from tools.launch import check_run, cpu_threads, find_nodes, ranks_per_node
from tools.preflight_rank import FOUND

PROGRAM = ["-m", "tools.preflight_rank"]
POLL_SECONDS = 0.1
FAREWELL_SECONDS = 5.0


def main(arguments: list[str], environment: Mapping[str, str]) -> int:
    if not arguments or arguments[0] in ("--help", "-h"):
        print(__doc__, file=sys.stderr)
        return exit_codes.DONE if arguments else exit_codes.BAD_CONFIG
    try:
        config = load_config(Path(arguments[0]), arguments[1:])
        n_ranks, nodes = ranks_per_node(environment), find_nodes(environment)
        check_run(config, n_ranks * nodes.count)
    except ValueError as error:
        print(error, file=sys.stderr)
        return exit_codes.BAD_CONFIG
    seconds = config.comm.init_timeout_seconds
    if nodes.count > 1:
        try:
            store = open_store(nodes, seconds)
            findings = meet(store, nodes, n_ranks=n_ranks, seconds=seconds)
        except dist.DistError as error:
            reason = str(error).partition("\n")[0]
            where = f"{nodes.address}:{nodes.port}"
            findings = [f"node {nodes.rank}: no answer from node 0 at {where}: {reason}"]
        if findings:
            print("\n".join(findings), file=sys.stderr)
            return exit_codes.FAILED
    os.environ.setdefault("OMP_NUM_THREADS", str(cpu_threads(n_ranks)))
    # Ranks get -P if we have it: no module is imported from an unsafe folder.
    program = [*(["-P"] if sys.flags.safe_path else []), *PROGRAM, *arguments]
    end = run_ranks(program, n_ranks=n_ranks, nodes=nodes, shown={0})
    codes = set(end.codes.values())
    if exit_codes.BAD_CONFIG in codes:
        return exit_codes.BAD_CONFIG
    if FOUND in codes or codes == {exit_codes.DONE}:
        return exit_codes.FAILED if FOUND in codes else exit_codes.DONE
    if nodes.rank == 0:
        told = [f"exit codes by rank: {end.codes}"] if end.verdict is None else end.verdict.lines
        print("the ranks did not come to an end:\n  " + "\n  ".join(told), file=sys.stderr)
    return exit_codes.FAILED


def meet(store: dist.Store, nodes: Nodes, *, n_ranks: int, seconds: float) -> list[str]:
    """Wait up to ``seconds`` for all nodes; return what is wrong, on every node that came."""
    store = dist.PrefixStore("preflight", store)
    place = store.add(f"came/{nodes.rank}", 1)
    store.set(f"node/{nodes.rank}/{place}", json.dumps([socket.gethostname(), n_ranks]))
    if nodes.rank > 0 or place > 1:
        # Twice as long, because the head may have begun to wait later.
        store.wait(["met"], timedelta(seconds=2 * seconds))
        findings = json.loads(store.get("met"))
        store.add("told", 1)
        return findings
    deadline = time.monotonic() + seconds
    firsts = [f"node/{rank}/1" for rank in range(nodes.count)]
    while not store.check(firsts) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    came = {rank: store.add(f"came/{rank}", 0) for rank in range(nodes.count)}
    hosts: dict[int, list[str]] = {}
    counts: dict[int, int] = {}
    for rank, number in came.items():
        for again in range(1, number + 1):
            host, counts[rank] = json.loads(store.get(f"node/{rank}/{again}"))
            hosts.setdefault(rank, []).append(host)
    findings = [
        f"node {rank} did not come within {seconds:.0f} s" for rank in came if rank not in hosts
    ]
    findings += [
        f"node {rank}: {len(names)} say that they are it: {', '.join(names)}"
        for rank, names in hosts.items()
        if len(names) > 1
    ]
    findings += [
        f"node {rank} ({hosts[rank][0]}) has {count} ranks, and node 0 {n_ranks}"
        for rank, count in counts.items()
        if count != n_ranks
    ]
    if len(hosts) < nodes.count:
        there = ", ".join(f"{rank} ({names[0]})" for rank, names in hosts.items())
        findings.append(f"nodes that came: {there}")
    store.set("met", json.dumps(findings))
    # All that came must hear it before this process ends, and the store with it.
    deadline = time.monotonic() + FAREWELL_SECONDS
    while store.add("told", 0) < sum(came.values()) - 1 and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return findings


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:], os.environ))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
