"""Check a run, then start its ranks on this node with torchrun: ``tools.launch CONFIG ...``

Environment: NGPU (ranks on this node), LOG_RANK, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT;
inside a Slurm step the node variables come from Slurm. Exits with the trainer's own code,
which torchrun alone would flatten to 1.
"""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from config import JobConfig, load_config
from models import find_model
from parallelisms.support import check_support
from runtime import exit_codes
from runtime.compat import usable_cpus

TRAINER = Path(__file__).parents[1] / "train.py"
DEFAULT_CPU_RANKS = 2
# Seconds that ranks have to save after SIGTERM before torchrun kills them; its default is 30.
SHUTDOWN_SECONDS = 120


@dataclass(frozen=True)
class Nodes:
    """The nodes of this run, and which one this is."""

    count: int
    rank: int
    address: str
    port: int


def main(arguments: list[str], environment: Mapping[str, str]) -> int:
    if not arguments:
        print(__doc__, file=sys.stderr)
        return exit_codes.BAD_CONFIG
    try:
        config_path, overrides = Path(arguments[0]), arguments[1:]
        config = load_config(config_path, overrides)
        n_ranks = ranks_per_node(environment)
        nodes = find_nodes(environment)
        _, args = find_model(config.model.name, config.model.flavor)
        has_gpu = torch.cuda.is_available()
        check_support(config, args, n_ranks * nodes.count, has_gpu=has_gpu)
        command = torchrun_arguments(n_ranks, nodes, environment.get("LOG_RANK") or "0")
    except ValueError as error:
        print(error, file=sys.stderr)
        return exit_codes.BAD_CONFIG
    os.environ.setdefault("OMP_NUM_THREADS", str(cpu_threads(n_ranks)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
    return _run([*command, str(TRAINER), str(config_path), *overrides], config)


def ranks_per_node(environment: Mapping[str, str]) -> int:
    """NGPU, else Slurm's GPUs, else the visible GPUs, else two processes on the CPU."""
    asked = environment.get("NGPU") or environment.get("SLURM_GPUS_ON_NODE")
    if asked is None:
        return torch.cuda.device_count() or DEFAULT_CPU_RANKS
    return _number("NGPU", asked, at_least=1)


def find_nodes(environment: Mapping[str, str]) -> Nodes:
    """One node unless NNODES or a Slurm step says otherwise; ``ValueError`` without a head."""
    nodes = environment.get("NNODES") or environment.get("SLURM_NNODES") or "1"
    count = _number("NNODES", nodes, at_least=1)
    node = environment.get("NODE_RANK") or environment.get("SLURM_NODEID") or "0"
    rank = _number("NODE_RANK", node, at_least=0)
    if rank >= count:
        raise ValueError(f"NODE_RANK={rank}: must be less than NNODES={count}")
    # Jobs that share a head node must not share a port.
    job = _number("SLURM_JOB_ID", environment.get("SLURM_JOB_ID", "0"), at_least=0)
    asked_port = environment.get("MASTER_PORT")
    port = _number("MASTER_PORT", asked_port, at_least=1) if asked_port else 20000 + job % 20000
    address = environment.get("MASTER_ADDR", "")
    if count > 1 and not address:
        # No fallback to localhost: that would train as many separate worlds as there are nodes.
        if "SLURM_STEP_NODELIST" not in environment:
            raise ValueError(f"MASTER_ADDR: must name the head node of NNODES={count}")
        command = ["scontrol", "show", "hostnames", environment["SLURM_STEP_NODELIST"]]
        try:
            listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        except FileNotFoundError:
            raise ValueError("MASTER_ADDR: must name the head node: no scontrol here") from None
        address = listed.split()[0]
    return Nodes(count, rank, address, port)


def _number(name: str, text: str, *, at_least: int) -> int:
    if not text.isdecimal() or int(text) < at_least:
        raise ValueError(f"{name}={text!r}: must be a whole number, {at_least} or more")
    return int(text)


def cpu_threads(n_ranks: int) -> int:
    """Threads per rank that fill this machine's cores once."""
    return max(1, usable_cpus() // n_ranks)


def torchrun_arguments(n_ranks: int, nodes: Nodes, log_ranks: str) -> list[str]:
    """What torchrun is told before the program; ``log_ranks`` as in LOG_RANK: 0,1"""
    for rank in log_ranks.split(","):
        _number("LOG_RANK", rank, at_least=0)
    arguments = ["--nproc_per_node", str(n_ranks), "--local-ranks-filter", log_ranks]
    if nodes.count == 1:
        return [*arguments, "--standalone"]
    rendezvous = f"{nodes.address}:{nodes.port}"
    return [
        *arguments,
        *("--nnodes", str(nodes.count), "--node_rank", str(nodes.rank)),
        *("--rdzv_backend", "static", "--rdzv_endpoint", rendezvous),
    ]


def _run(arguments: list[str], config: JobConfig) -> int:
    outcome = Path(config.job.output_dir) / config.job.name / "control" / "outcome"
    # Says less than the summary in the error that follows it.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        torchrun.run(torchrun.parse_args(arguments))
    except ChildFailedError as error:
        # The first rank to end makes torchrun terminate those that are still on their way out.
        codes = {failure.exitcode for failure in error.failures.values()} - {-signal.SIGTERM}
        known = codes & {exit_codes.BAD_CONFIG, exit_codes.PREEMPTED, exit_codes.DO_NOT_REQUEUE}
        if len(known) != 1 or codes != known:
            raise
        if exit_codes.BAD_CONFIG in known:
            print(error.get_first_failure()[1].message, file=sys.stderr)
        return known.pop()
    except SignalException:
        # torchrun passed the signal on and waited: what became of the ranks is in their outcome.
        is_stopped = outcome.exists() and outcome.read_text().startswith("stopped SIG")
        return exit_codes.PREEMPTED if is_stopped and config.checkpoint.enable else 1
    return exit_codes.DONE


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:], os.environ))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
