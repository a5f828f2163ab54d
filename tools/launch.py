"""Check a run, then start its ranks on this node as torchrun does: ``tools.launch CONFIG ...``

Environment: NGPU (ranks on this node), LOG_RANK, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT;
inside a Slurm step the node variables come from Slurm. Exits with the trainer's own code,
which torchrun alone would flatten to 1, and with 93 when trying again would not help.
"""

# ruff: noqa: E402
from runtime.imports import begin_imports, end_imports

begin_imports()

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from config import ConfigError, JobConfig, load_config
from models import find_model
from parallelisms.support import check_support
from runtime import exit_codes
from runtime.control import is_held
from runtime.failures import MOST_ATTEMPTS, published_step, record_end, record_failure
from runtime.machine import let_segments_grow, usable_cpus
from tools.agent import End, Nodes, run_ranks

end_imports()

DONE_ENDINGS = (exit_codes.FINISHED, exit_codes.STOP_FILE, exit_codes.DATA_ENDED)
TRAINER = Path(__file__).parents[1] / "train.py"
DEFAULT_CPU_RANKS = 2


def main(arguments: list[str], environment: Mapping[str, str]) -> int:
    if not arguments:
        print(__doc__, file=sys.stderr)
        return exit_codes.BAD_CONFIG
    try:
        config_path, overrides = Path(arguments[0]), arguments[1:]
        config = load_config(config_path, overrides)
        n_ranks = ranks_per_node(environment)
        nodes = find_nodes(environment)
        check_run(config, n_ranks * nodes.count)
        # All ranks log the same; one copy of it is enough.
        asked = environment.get("LOG_RANK") or ("0" if nodes.rank == 0 else "")
        shown = shown_ranks(asked, n_ranks) if asked else set()
        logs, control = config.job.folder / "logs", config.job.folder / "control"
        if nodes.rank == 0:
            forget_end(control)
    except ValueError as error:
        print(error, file=sys.stderr)
        return exit_codes.BAD_CONFIG
    os.environ.setdefault("OMP_NUM_THREADS", str(cpu_threads(n_ranks)))
    let_segments_grow()
    program = [str(TRAINER), str(config_path), *overrides]
    try:
        end = run_ranks(program, n_ranks=n_ranks, nodes=nodes, shown=shown, logs=logs)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return exit_codes.BAD_CONFIG
    code = exit_code(end, _outcome(control), has_checkpoints=config.checkpoint.enable)
    if code == exit_codes.BAD_CONFIG:
        print(end.message or f"exit codes by rank: {end.codes}", file=sys.stderr)
    if nodes.rank > 0:
        return code
    if code == exit_codes.BAD_CONFIG and control.exists() and is_held(control):
        # This start was refused for another, whose launcher reports there.
        return code
    if code == exit_codes.FAILED:
        code = fail(end, control)
    elif code in (exit_codes.DONE, exit_codes.PREEMPTED):
        record_end(control, _outcome(control))
    exit_codes.report(control, code)
    return code


def forget_end(control: Path) -> None:
    """Remove the last launcher's exit code; ``ConfigError`` where no run can have a folder."""
    try:
        exit_codes.forget(control)
    except OSError as error:
        raise ConfigError([f"job.output_dir: {error}"]) from None


def check_run(config: JobConfig, n_ranks: int) -> None:
    """Raise ``ValueError`` for what cannot be run, without opening data or tokenizer."""
    _, args = find_model(config.model.name, config.model.flavor)
    check_support(config, args, n_ranks, has_gpu=torch.cuda.is_available())


def exit_code(end: End, outcome: str, *, has_checkpoints: bool) -> int:
    """The launcher's exit code; ``outcome`` is what the run's ``control/outcome`` says."""
    codes = set(end.codes.values())
    # One such rank decides, because others fail by waiting for it.
    for code in (exit_codes.BAD_CONFIG, exit_codes.DO_NOT_REQUEUE):
        if code in codes:
            return code
    if end.signal is not None:
        has_saved = outcome.startswith("stopped SIG") and has_checkpoints
        # Ranks that die of the signal had not yet begun to handle it, so nothing is lost.
        if has_saved or codes <= {-end.signal}:
            return exit_codes.PREEMPTED
        has_ended = outcome in [ending.outcome for ending in DONE_ENDINGS]
        is_done = has_ended and codes == {exit_codes.DONE}
        return exit_codes.DONE if is_done else exit_codes.FAILED
    # The first rank to end makes the agent terminate those that are still on their way out.
    if codes - {-signal.SIGTERM} == {exit_codes.PREEMPTED}:
        return exit_codes.PREEMPTED
    return exit_codes.DONE if codes == {exit_codes.DONE} else exit_codes.FAILED


def fail(end: End, control: Path) -> int:
    """Tell of a failure, here and in ``control/failures``; return the exit code."""
    lines = [f"exit codes by rank: {end.codes}"]
    if end.verdict is not None:
        lines = end.verdict.lines
        print(end.verdict.traceback, end="", file=sys.stderr)
    if end.verdict is not None or end.signal is None:
        print("the run failed: " + "\n  ".join(lines), file=sys.stderr)
    if end.signal is not None:
        # It was told to stop, so nobody knows whether it would fail again.
        return exit_codes.FAILED
    attempt = record_failure(control, lines=lines, codes=end.codes)
    if attempt < MOST_ATTEMPTS:
        return exit_codes.FAILED
    print(
        f"{attempt} attempts failed without a newer checkpoint than step {published_step(control)}:"
        f" not trying again. See {control / 'failures'}",
        file=sys.stderr,
    )
    return exit_codes.DO_NOT_REQUEUE


def _outcome(control: Path) -> str:
    path = control / "outcome"
    return path.read_text().strip() if path.exists() else ""


def ranks_per_node(environment: Mapping[str, str]) -> int:
    """NGPU, else Slurm's GPUs, else the visible GPUs, else two processes on the CPU."""
    name = "NGPU" if environment.get("NGPU") else "SLURM_GPUS_ON_NODE"
    gpus = torch.cuda.device_count()
    if not environment.get(name):
        return gpus or DEFAULT_CPU_RANKS
    count = _number(name, environment[name], at_least=1)
    if 0 < gpus < count:
        text = "each rank needs a GPU; CUDA_VISIBLE_DEVICES= trains on the CPU"
        raise ValueError(f"{name}={count}: of GPUs {gpus} can be seen here, and {text}")
    return count


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


def shown_ranks(text: str, n_ranks: int) -> set[int]:
    """The ranks of this node whose output is shown; ``text`` as in LOG_RANK: 0,1"""
    shown = {_number("LOG_RANK", rank, at_least=0) for rank in text.split(",")}
    if max(shown) >= n_ranks:
        raise ValueError(f"LOG_RANK: {text}: a node's ranks are 0 to {n_ranks - 1}")
    return shown


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:], os.environ))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
