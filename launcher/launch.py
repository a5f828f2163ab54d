"""Validate a config, then start its ranks on this node: ``./shardloom train CONFIG ...``

Environment: NGPU (ranks on this node), LOG_RANK, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT;
inside a Slurm step the node variables default to Slurm's. Exits with the trainer's own code, which
torchrun would flatten to 1, and with 93 if a retry would not help.
"""

# ruff: noqa: E402
from runtime.imports import begin_imports, end_imports

IS_PROGRAM = __name__ == "__main__"
leave = begin_imports(announcement="start: importing PyTorch" if IS_PROGRAM else "")

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from config import ConfigError, JobConfig, find_run_folder, load_config
from config.auto import auto_keys, candidates
from config.hub_names import CONFIG_FILES
from launcher.agent import End, run_ranks
from launcher.auto import decide_auto
from launcher.console import Console, PlainScreen, is_terminal
from launcher.failures import MOST_ATTEMPTS, newest_saved_step, record_end, record_failure
from launcher.rendezvous import Nodes, end_other_nodes
from launcher.screen import TerminalScreen
from models import find_model
from parallelisms.constraints import check_constraints
from runtime import exit_codes
from runtime.commands import COMMAND_VARIABLE, command_text, program
from runtime.filesystem import check_run_folder
from runtime.hub_paths import local_path, pin_names
from runtime.log import error_text, escape_on_stdout, red, report, say, unless_closed
from runtime.machine import available_cpus
from runtime.run_folder import OLD_STOP, list_checkpoints, read_text, step_of, stop_file_id
from runtime.run_lock import WAIT_SECONDS, is_locked
from runtime.torch_device import enable_expandable_segments, machine_facts

end_imports(was_announced=IS_PROGRAM)

TRAINER = Path(__file__).parents[1] / "train.py"
DEFAULT_CPU_RANKS = 2


def main(arguments: list[str], environment: Mapping[str, str]) -> int:
    """Launch the config and overrides in ``arguments``; return the exit code."""
    escape_on_stdout()
    if not arguments:
        print(__doc__, file=sys.stderr)
        return exit_codes.BAD_CONFIG
    try:
        nodes = find_nodes(environment)
    except ValueError as error:
        report(error)
        return exit_codes.BAD_CONFIG
    control, variables = None, dict[str, str]()
    try:
        config = pin_names(load_config(Path(arguments[0]), arguments[1:]))
        control = config.job.folder / "control"
        n_ranks = ranks_per_node(environment)
        if not (mistake := mistake_in(config, n_ranks, nodes.count)):
            config = decide_auto(config, n_ranks, nodes.count)
        # All ranks log the same lines, so one rank is shown.
        log_rank = environment.get("LOG_RANK") or ("0" if nodes.rank == 0 else "")
        shown = shown_ranks(log_rank, n_ranks) if log_rank else set()
        logs = config.job.folder / "logs"
        if nodes.rank == 0:
            clear_previous_end(control)
            variables[OLD_STOP] = environment.get(OLD_STOP, stop_file_id(control))
    except ValueError as error:
        report(error)
        end_other_nodes(nodes, str(error))
        if control is None and (folder := find_run_folder(Path(arguments[0]), arguments[1:])):
            control = folder / "control"
        return reject(nodes, control, error_text(error))
    set_thread_defaults(n_ranks)
    enable_expandable_segments()
    variables[COMMAND_VARIABLE] = json.dumps([program(), "train", *arguments])
    try:
        with open_console(config.job.name) as console:
            end = run_ranks(
                [str(TRAINER)], config, n_ranks=n_ranks, nodes=nodes, shown=shown, console=console,
                logs=logs, mistake=mistake, variables=variables,
            )  # fmt: skip
    except ConfigError as error:
        report(error)
        return reject(nodes, control, error_text(error))
    code = exit_code(end, _outcome(control), has_checkpoints=config.checkpoint.enable)
    rejection = end.message or f"exit codes by rank: {end.codes}"
    if code == exit_codes.BAD_CONFIG:
        with unless_closed(sys.stderr):
            print(red(rejection), file=sys.stderr)
    if nodes.rank > 0:
        _say_end_of_node(nodes, code, logs)
        return code
    if code == exit_codes.BAD_CONFIG:
        return reject(nodes, control, rejection)
    code = report_end(end, code, control, n_ranks=n_ranks)
    with unless_closed(sys.stdout):
        if end.signal is not None and end.is_before_training:
            say(f"stopped by {end.signal.name} before it trained: the run is as it was")
        if code in (exit_codes.DONE, exit_codes.PREEMPTED):
            say(*next_commands(config, _outcome(control), environment, is_alone=nodes.count == 1))
    return code


def reject(nodes: Nodes, control: Path | None, reason: str) -> int:
    """Return the exit code of a start that was rejected; the head node tells a scheduler, too."""
    if nodes.rank == 0 and control is not None:
        record_rejection(control, reason)
    return exit_codes.BAD_CONFIG


def record_rejection(control: Path, reason: str) -> None:
    """Write why a start was rejected to its run, if that exists and does not train."""
    with suppress(OSError):  # Links are not followed.
        check_run_folder(control.parent)
        # If another run has locked the folder, its launcher writes there.
        if control.exists() and not is_locked(control):
            exit_codes.write_rejection(control, reason)


def _say_end_of_node(nodes: Nodes, code: int, logs: Path) -> None:
    # A log that all nodes share has the head's end.
    if is_terminal(1):
        text = f"node {nodes.rank} of {nodes.count}: ended with exit code {code}"
        with unless_closed(sys.stdout):
            say(f"{text}; the head {nodes.address} showed the log; of the ranks here: {logs}")


def next_commands(
    config: JobConfig, outcome: str, environment: Mapping[str, str], *, is_alone: bool
) -> list[str]:
    """Lines with the commands that usually follow a run that ended with ``outcome``.

    ``is_alone``: it has one node, so that one command starts it.
    """
    folder = config.job.folder
    ranks = f"NGPU={environment['NGPU']} " if environment.get("NGPU") else ""
    # Before the first step there is nothing to save.
    checkpoints: list[Path] = []
    with suppress(OSError):
        checkpoints = list_checkpoints(folder / "checkpoints") if config.checkpoint.enable else []
    has_checkpoints = bool(checkpoints)
    is_whole = outcome == exit_codes.FINISHED.outcome
    # The resolved configuration: the one that was named may be a pipe, or change.
    resolved = folder / "config.toml"
    can_start = has_checkpoints or (not is_whole and resolved.exists())
    commands = {}
    # A run that consumed its data would end at once.
    if can_start and is_alone and outcome != exit_codes.DATA_ENDED.outcome:
        planned = config.lr_scheduler.total_steps or 0
        # It may have been trained on before, and started again with fewer steps.
        reached = max([config.training.steps, *map(step_of, checkpoints[:1])])
        is_part = planned > reached
        steps = planned if is_part else 2 * reached
        longer = ["--training.steps", steps] if is_whole else []
        if is_whole and not is_part:
            # The resolved configuration has the former number of steps.
            longer += ["--lr_scheduler.total_steps", steps]
        resume = command_text("train", resolved, *longer)
        purpose = "resume" if has_checkpoints else "start again"
        commands["train on" if is_whole else purpose] = ranks + resume
    if has_checkpoints:
        # A model from outside is imported only if it is named.
        outside = ["--model", config.model.name] if config.model.is_outside else []
        commands["generate text"] = command_text("generate", folder, *outside)
    has_steps = (folder / "metrics.jsonl").exists()
    if has_steps:
        commands["report"] = command_text("report", folder)
    if has_steps and "tensorboard" in config.metrics.trackers:
        commands["curves"] = command_text("tensorboard", "--logdir", folder / "tensorboard")
    on_builtin = config.data.source == "builtin" and not config.data.sources
    if on_builtin and is_alone and (has_checkpoints or resolved.exists()):
        own = ["--data.source", "files", "--data.path", "books/**/*.txt", "--job.name", "books"]
        commands["your own text"] = ranks + command_text("train", resolved, *own)
    return [f"next: {purpose}: {command}" for purpose, command in commands.items()]


def open_console(title: str) -> Console:
    """Console on stdout, with a live line if that is a terminal."""
    return Console(TerminalScreen(title) if is_terminal(1) else PlainScreen())


def clear_previous_end(control: Path) -> None:
    """Delete the last launcher's exit code. Raises ``ConfigError`` if the folder is unusable."""
    try:
        check_run_folder(control.parent)
        exit_codes.clear_exit_code(control)
    except OSError as error:
        raise ConfigError([f"job.output_dir: {error}"]) from None


def check_run(config: JobConfig, n_ranks: int, n_nodes: int) -> JobConfig:
    """Return ``config``, with supported values for what is "auto"; opens no data or tokenizer.

    ``n_ranks``: ranks on each of ``n_nodes``. Raises ``ValueError`` if it is not supported.
    """
    flavor = local_path(config.model.flavor, CONFIG_FILES, key="model.flavor")
    _, args = find_model(config.model.name, flavor, config.model.args)
    errors = []
    for each in candidates(config):
        try:
            check_constraints(each, args, n_ranks * n_nodes, **machine_facts(), n_nodes=n_nodes)
            return each
        except ConfigError as error:
            errors.append(error)
    raise errors[-1]


def mistake_in(config: JobConfig, n_ranks: int, n_nodes: int) -> str:
    """Return why so many ranks on each node cannot train ``config``; "" if they can.

    Raises ``ValueError`` if other numbers on other nodes, with which ranks check it again, cannot
    make it right, or would be needed to decide what is "auto".
    """
    try:
        check_run(config, n_ranks, n_nodes)
    except ConfigError as error:
        if n_nodes == 1 or auto_keys(config):
            raise
        return str(error)
    return ""


def exit_code(end: End, outcome: str, *, has_checkpoints: bool) -> int:
    """Return the launcher's exit code; ``outcome`` is the content of ``control/outcome``."""
    codes = set(end.codes.values())
    # One such rank decides, because the others fail while they wait for it.
    for code in (exit_codes.BAD_CONFIG, exit_codes.DO_NOT_REQUEUE):
        if code in codes:
            return code
    if end.signal is not None:
        has_saved = outcome.startswith("stopped SIG") and has_checkpoints
        if has_saved or end.is_before_training:
            return exit_codes.PREEMPTED
        has_ended = outcome in [reason.outcome for reason in exit_codes.COMPLETE]
        is_done = has_ended and codes == {exit_codes.DONE}
        return exit_codes.DONE if is_done else exit_codes.FAILED
    # When one rank exits, the agent terminates ranks that have not finished exiting.
    if codes - {-signal.SIGTERM} == {exit_codes.PREEMPTED}:
        return exit_codes.PREEMPTED
    return exit_codes.DONE if codes == {exit_codes.DONE} else exit_codes.FAILED


def is_running(control: Path) -> bool:
    """True if a run has locked its folder, and not only ``is_locked`` of another start."""
    # A folder that cannot be locked may be the reason why this start failed.
    if not (control.exists() and is_locked(control, if_unknown=False)):
        return False
    time.sleep(WAIT_SECONDS)
    return is_locked(control, if_unknown=False)


def report_end(end: End, code: int, control: Path, *, n_ranks: int) -> int:
    """Report on the head node, and to a scheduler, how the run ended; return the exit code."""
    has_ended = len(end.codes) in (0, n_ranks)
    if has_ended and code != exit_codes.DONE and is_running(control):
        # No rank of this start lives: the launcher of the run that holds the lock writes there.
        say(*(end.verdict.lines if end.verdict is not None else []), is_error=True)
        return code
    if code == exit_codes.FAILED:
        code = report_failure(end, control)
    elif code in (exit_codes.DONE, exit_codes.PREEMPTED):
        record_end(control, _outcome(control))
    exit_codes.write_exit_code(control, code)
    return code


def report_failure(end: End, control: Path) -> int:
    """Report a failure on stderr and in ``control/failures``; return the exit code."""
    lines = [f"exit codes by rank: {end.codes}"]
    with unless_closed(sys.stderr):
        if end.verdict is not None:
            lines = end.verdict.lines
            print(end.verdict.traceback, end="", file=sys.stderr)
        if end.verdict is not None or end.signal is None:
            first, *others = lines
            say(f"the run failed: {first}", *(f"  {line}" for line in others), is_error=True)
    if end.signal is not None:
        # The run was asked to stop, so it is unknown whether a retry would fail.
        return exit_codes.FAILED
    attempt = record_failure(control, lines=lines, codes=end.codes)
    if attempt < MOST_ATTEMPTS:
        return exit_codes.FAILED
    with unless_closed(sys.stderr):
        say(
            f"{attempt} attempts failed without a checkpoint newer than step"
            f" {newest_saved_step(control)}: not retrying. See {control / 'failures'}",
            is_error=True,
        )
    return exit_codes.DO_NOT_REQUEUE


def _outcome(control: Path) -> str:
    return read_text(control / "outcome")


def ranks_per_node(environment: Mapping[str, str]) -> int:
    """NGPU, else Slurm's GPUs, else the visible GPUs, else two CPU ranks.

    Raises ``ValueError`` for more ranks than visible GPUs, unless NCCL may share them, or CPUs are
    asked for: by an empty CUDA_VISIBLE_DEVICES, or by NGPU where Slurm counts no GPUs.
    """
    name = "NGPU" if environment.get("NGPU") else "SLURM_GPUS_ON_NODE"
    gpus = torch.cuda.device_count()
    if not environment.get(name):
        return gpus or DEFAULT_CPU_RANKS
    count = _number(name, environment[name], at_least=1)
    if gpus == 0:
        # Slurm counts GPUs that the driver lost: CPUs train only if that is asked for.
        in_slurm = environment.get("SLURM_GPUS_ON_NODE")
        is_short = bool(in_slurm) and environment.get("CUDA_VISIBLE_DEVICES") != ""
    else:
        is_short = gpus < count and environment.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1"
    if is_short:
        ways = ["CUDA_VISIBLE_DEVICES= to train on the CPU"]
        if gpus > 0:
            sharing = "NCCL_MULTI_RANK_GPU_ENABLE=1 to share them (NCCL 2.30, of PyTorch 2.15)"
            ways = [f"NGPU={gpus} to train on these", *ways, sharing]
        text = f"only {gpus} GPUs are visible, and each rank needs one; set {', or '.join(ways)}"
        raise ValueError(f"{name}={count}: {text}")
    return count


def count_nodes(environment: Mapping[str, str]) -> int:
    """NNODES, else Slurm's number of nodes, else one."""
    nodes = environment.get("NNODES") or environment.get("SLURM_NNODES") or "1"
    return _number("NNODES", nodes, at_least=1)


def find_nodes(environment: Mapping[str, str]) -> Nodes:
    """Nodes from NNODES etc., else from the Slurm step, else one. ``ValueError`` without a head."""
    count = count_nodes(environment)
    node = environment.get("NODE_RANK") or environment.get("SLURM_NODEID") or "0"
    rank = _number("NODE_RANK", node, at_least=0)
    if rank >= count:
        raise ValueError(f"NODE_RANK={rank}: must be less than NNODES={count}")
    port, *_ = head_ports(environment)
    address = environment.get("MASTER_ADDR", "")
    if count > 1 and not address:
        # No fallback to localhost, which would train a separate world on each node.
        if "SLURM_STEP_NODELIST" not in environment:
            if environment.get("NNODES"):
                raise ValueError(f"MASTER_ADDR: must name the head node of NNODES={count}")
            start = "srun --ntasks-per-node=1 --cpu-bind=none ./run_train.sh ..."
            text = f"this Slurm job has {count} nodes: start {start}, or set NNODES=1"
            raise ValueError(f"SLURM_NNODES={count}: {text}")
        command = ["scontrol", "show", "hostnames", environment["SLURM_STEP_NODELIST"]]
        try:
            hosts = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        except FileNotFoundError:
            raise ValueError("MASTER_ADDR: must name the head node: scontrol not found") from None
        address = hosts.split()[0]
    return Nodes(count, rank, address, port)


def head_ports(environment: Mapping[str, str]) -> list[int]:
    """Ports for the head's store, best first: MASTER_PORT, else three of the Slurm job."""
    if text := environment.get("MASTER_PORT"):
        port = _number("MASTER_PORT", text, at_least=1)
        if port > 65535:
            raise ValueError(f"MASTER_PORT={port}: must be at most 65535")
        return [port]
    # Jobs that share a head node need different ports, below the kernel's free ones, which begin
    # at 32768.
    job = _number("SLURM_JOB_ID", environment.get("SLURM_JOB_ID", "0"), at_least=0)
    return [20000 + (job + shift) % 12000 for shift in (0, 4000, 8000)]


def _number(name: str, text: str, *, at_least: int) -> int:
    if not text.isdecimal() or int(text) < at_least:
        raise ValueError(f"{name}={text!r}: must be an integer, {at_least} or more")
    return int(text)


def set_thread_defaults(n_ranks: int) -> None:
    """Set ranks' numbers of OpenMP threads and of spins at a barrier, unless the user did.

    All ranks together use each available CPU once. libgomp's 300,000 spins double the time of a
    step on a machine that is shared; 10,000 cost 5 % of one alone (docs/benchmarks/step.md).
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_cpus() // n_ranks)))
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def shown_ranks(text: str, n_ranks: int) -> set[int]:
    """Parse LOG_RANK, such as ``0,1``: the local ranks whose output is shown."""
    shown = {_number("LOG_RANK", rank, at_least=0) for rank in text.split(",")}
    if max(shown) >= n_ranks:
        raise ValueError(f"LOG_RANK: {text}: a node's ranks are 0 to {n_ranks - 1}")
    return shown


if IS_PROGRAM:
    try:
        leave(main(sys.argv[1:], os.environ))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
