"""Check the run of a Slurm job: ``tools.slurm_begin CONFIG [--section.key value ...]``

For ``slurm/train.sbatch``, on the head node: prints the run folder, MASTER_PORT, OLD_STOP, the
configuration and its overrides, each terminated by a zero byte. Prints nothing if control/stop was
written while the job was queued. Exits with 2 and the reason if the run cannot be trained.

``SWEEP`` is a TOML file of ``[[runs]]`` shaped like a configuration: task i of a job array trains
the configuration with the overrides and runs[i], as ``<job.name>-i`` unless runs[i] names it.
"""

import math
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli

from config import ConfigError, JobConfig, find_run_folder, load_config
from config.job_config import Job
from config.loader import is_table
from config.paths import expand_path, literal_path
from launcher.failures import record_end
from launcher.launch import check_run, head_ports, ranks_per_node, record_rejection, shown_ranks
from runtime import exit_codes
from runtime.filesystem import atomic_write_text, make_folder
from runtime.hub_paths import pin_names
from runtime.log import error_text, report, say
from runtime.outside import prints_to_stderr
from runtime.printable import reason_of
from runtime.run_folder import WriteAlarm, read_text, remove_file, stop_file_id
from runtime.run_lock import lock_run
from tools.cli import toml_text

# A file system may hold the locks of a lost node for so long.
LOCK_SECONDS = 120


def main(arguments: list[str], environment: Mapping[str, str]) -> int:
    """Check and print the run of this job; return the exit code."""
    if not arguments:
        print(
            "sbatch --nodes=N slurm/train.sbatch CONFIG [--section.key value ...]", file=sys.stderr
        )
        return exit_codes.BAD_CONFIG
    is_restart = "SLURM_RESTART_COUNT" in environment
    folder = None
    try:
        config = load_config(Path(arguments[0]), arguments[1:])
        if sweep := environment.get("SWEEP"):
            task = environment.get("SLURM_ARRAY_TASK_ID")
            arguments = [*arguments, *overrides_of(Path(sweep), task, config.job)]
            config = load_swept(sweep, task, arguments)
        folder = config.job.folder
        n_nodes = int(environment["SLURM_JOB_NUM_NODES"])
        n_ranks = ranks_per_node(environment)
        # Of --gpus, the number for all nodes, each may have another part: the launchers check it.
        if n_nodes == 1 or environment.get("NGPU") or not environment.get("SLURM_GPUS"):
            with prints_to_stderr():
                check_run(pin_names(config), n_ranks, n_nodes)
        if log_rank := environment.get("LOG_RANK"):
            shown_ranks(log_rank, n_ranks)
        port = free_port(head_ports(environment))
        wait_until_free(folder / "control", LOCK_SECONDS if is_restart else 0)
    except ValueError as error:
        report(error)
        # Of a sweep, the configuration alone may name another run.
        if folder is None and not environment.get("SWEEP"):
            folder = find_run_folder(Path(arguments[0]), arguments[1:])
        if folder is not None:
            record_rejection(folder / "control", error_text(error))
        return exit_codes.BAD_CONFIG
    control = folder / "control"
    if is_restart and os.path.lexists(control / "stop") and not is_obeyed(control):
        say(f"stopped: {control / 'stop'} was written before this restart", file=sys.stderr)
        end_run(control)
        return exit_codes.DONE
    try:
        # Launchers write their exit code to this folder.
        make_folder(control)
    except OSError as error:
        report(ConfigError([f"job.output_dir: {error}"]))
        return exit_codes.BAD_CONFIG
    exit_codes.clear_exit_code(control)
    old_stop = stop_file_id(control)
    if not is_restart:
        remove_file(control / "requeues")
        # Restarts of this job tell it from one that is meant for them.
        with WriteAlarm().of(control / "old_stop"):
            atomic_write_text(control / "old_stop", f"{old_stop}\n")
    # Bytes, as bash passed them.
    texts = (folder, port, old_stop, *arguments)
    sys.stdout.buffer.write(b"".join(os.fsencode(f"{text}\0") for text in texts))
    return exit_codes.DONE


def free_port(ports: Sequence[int]) -> int:
    """Return the first of ``ports`` on which this machine can listen; else the first of all.

    The launcher then says why it cannot.
    """
    for port in ports:
        with suppress(OSError), socket.create_server(("", port)):
            return port
    return ports[0]


def is_obeyed(control: Path) -> bool:
    """True if ``stop`` is from before the job, or has ended the run: it is not for this start."""
    if (old := read_text(control / "old_stop")) and stop_file_id(control) == old:
        return True
    outcome, stop = control / "outcome", control / "stop"
    if read_text(outcome) != exit_codes.STOP_FILE.outcome:
        return False
    try:
        return stop.lstat().st_mtime <= outcome.stat().st_mtime
    except OSError:
        return False


def end_run(control: Path) -> None:
    """Report that the stop file ended the run, as its ranks would."""
    outcome = exit_codes.STOP_FILE.outcome
    # The step that a rollback went back to is known only from its outcome.
    if exit_codes.last_step(control) == math.inf:
        with WriteAlarm().of(control / "outcome"):
            atomic_write_text(control / "outcome", f"{outcome}\n")
    record_end(control, outcome)


def overrides_of(path: Path, task: str | None, job: Job) -> list[str]:
    """Overrides of ``runs[task]`` of a sweep of ``job``.

    Raises ``ConfigError`` that names the file, and the run that is wrong, or two of one folder.
    """
    try:
        sweep = tomli.loads(Path(expand_path(str(path))).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError([f"{path}: {reason_of(error)}"]) from None
    runs = sweep.pop("runs", None)
    if sweep or not isinstance(runs, list) or not runs:
        raise ConfigError([f"{path}: must have [[runs]] and nothing else"])
    if task is None:
        raise ConfigError([f"{path}: needs a job array: sbatch --array=0-{len(runs) - 1}"])
    index = int(task)
    if index >= len(runs):
        raise ConfigError([f"{path}: there is no runs[{index}], only 0 to {len(runs) - 1}"])
    folders: dict[str, int] = {}
    for number, run in enumerate(runs):
        where = f"{path}: runs[{number}]"
        if not isinstance(run, dict):
            raise ConfigError([f"{where} is not a table"])
        if scalars := [key for key, value in run.items() if not isinstance(value, dict)]:
            raise ConfigError([f"{where}.{key}: not a section.key" for key in scalars])
        run["job"] = {"name": f"{job.name}-{number}"} | run.get("job", {})
        try:
            parent = expand_path(str(run["job"].get("output_dir", literal_path(job.output_dir))))
        except ValueError as error:
            raise ConfigError([f"{where}: job.output_dir: {error}"]) from None
        folder = os.path.realpath(Path(parent, str(run["job"]["name"])))
        if (other := folders.setdefault(folder, number)) != number:
            # One would resume the other's checkpoints.
            raise ConfigError([f"{where} has the folder of runs[{other}]: {folder}"])
    return [
        override
        for section, values in runs[index].items()
        for key, value in values.items()
        for override in _overrides(section, key, value)
    ]


def _overrides(section: str, key: str, value: Any) -> list[str]:
    """Overrides of a key; of a table such as ``model.args``, one for each entry."""
    if isinstance(value, dict) and is_table(section, key):
        return [f"--{section}.{key}.{entry}={toml_text(each)}" for entry, each in value.items()]
    return [f"--{section}.{key}={toml_text(value)}"]


def load_swept(sweep: str, task: str | None, arguments: list[str]) -> JobConfig:
    """Load the configuration with a sweep's overrides; attribute every error to the sweep."""
    try:
        return load_config(Path(arguments[0]), arguments[1:])
    except ConfigError as error:
        messages = [message.removeprefix("command line: ") for message in error.messages]
        raise ConfigError([f"{sweep}: runs[{task}]: {message}" for message in messages]) from None


def wait_until_free(control: Path, seconds: float) -> None:
    """Wait until no process holds the lock; raise ``ConfigError`` if one does after ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if control.exists():
                lock_run(control).close()
            return
        except OSError as error:  # The folder is another user's.
            raise ConfigError([f"job.output_dir: {error}"]) from None
        except ConfigError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(1.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
