"""Check what a Slurm job is to train: ``tools.slurm_begin CONFIG [--section.key value ...]``

For ``slurm/train.sbatch``: prints the run's folder, the configuration and its overrides, a zero
byte after each; nothing, if a person told the run to stop while the job waited. Exits with 2 and
the reason if there is nothing that could be trained.

With ``SWEEP``, a TOML file of ``[[runs]]`` shaped like a configuration, task i of a job array
trains the configuration, the overrides and runs[i], as ``<job.name>-i`` unless runs[i] names it.
"""

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli
import tomli_w

from config import ConfigError, JobConfig, load_config
from runtime import exit_codes
from runtime.control import lock_run
from runtime.run_folder import make_folder
from tools.launch import check_run, ranks_per_node, shown_ranks

# A node that was lost may hold its locks for so long.
LOCK_SECONDS = 120


def main(arguments: list[str], environment: Mapping[str, str]) -> int:
    if not arguments:
        print(
            "sbatch --nodes=N slurm/train.sbatch CONFIG [--section.key value ...]", file=sys.stderr
        )
        return exit_codes.BAD_CONFIG
    is_restart = "SLURM_RESTART_COUNT" in environment
    try:
        config = load_config(Path(arguments[0]), arguments[1:])
        if sweep := environment.get("SWEEP"):
            task = environment.get("SLURM_ARRAY_TASK_ID")
            arguments = [*arguments, *overrides_of(Path(sweep), task, name=config.job.name)]
            config = load_swept(sweep, task, arguments)
        n_nodes = int(environment["SLURM_JOB_NUM_NODES"])
        n_ranks = ranks_per_node(environment)
        check_run(config, n_ranks * n_nodes)
        if asked := environment.get("LOG_RANK"):
            shown_ranks(asked, n_ranks)
        folder = config.job.folder
        wait_until_free(folder / "control", LOCK_SECONDS if is_restart else 0)
    except ValueError as error:
        print(error, file=sys.stderr)
        return exit_codes.BAD_CONFIG
    control = folder / "control"
    if is_restart and (control / "stop").exists():
        print(f"stopped: {control / 'stop'} was written while the job waited", file=sys.stderr)
        return exit_codes.DONE
    # Launchers report in this folder how they end.
    make_folder(control)
    exit_codes.forget(control)
    if not is_restart:
        (control / "requeues").unlink(missing_ok=True)
    sys.stdout.write("".join(f"{text}\0" for text in [str(folder), *arguments]))
    return exit_codes.DONE


def overrides_of(path: Path, task: str | None, *, name: str) -> list[str]:
    """What ``runs[task]`` of a sweep changes; raises ``ConfigError`` that names file and run."""
    try:
        sweep = tomli.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError([f"{path}: {error}"]) from None
    runs = sweep.pop("runs", None)
    if sweep or not isinstance(runs, list) or not runs:
        raise ConfigError([f"{path}: must have [[runs]] and nothing else"])
    if task is None:
        raise ConfigError([f"{path}: needs a job array: sbatch --array=0-{len(runs) - 1}"])
    index = int(task)
    if index >= len(runs):
        raise ConfigError([f"{path}: there is no runs[{index}], only 0 to {len(runs) - 1}"])
    if not isinstance(runs[index], dict):
        raise ConfigError([f"{path}: runs[{index}] is not a table"])
    scalars = [key for key, value in runs[index].items() if not isinstance(value, dict)]
    if scalars:
        raise ConfigError([f"{path}: runs[{index}].{key}: no section.key" for key in scalars])
    tables = {section: dict(values) for section, values in runs[index].items()}
    tables.setdefault("job", {}).setdefault("name", f"{name}-{index}")
    return [
        f"--{section}.{key}={toml_text(value)}"
        for section, values in tables.items()
        for key, value in values.items()
    ]


def load_swept(sweep: str, task: str | None, arguments: list[str]) -> JobConfig:
    """Load with the sweep's changes; it loads without them, so any mistake is blamed on them."""
    try:
        return load_config(Path(arguments[0]), arguments[1:])
    except ConfigError as error:
        told = [message.removeprefix("command line: ") for message in error.messages]
        raise ConfigError([f"{sweep}: runs[{task}]: {message}" for message in told]) from None


def toml_text(value: Any) -> str:
    """A value of a TOML file as TOML, on one line."""
    if isinstance(value, dict):
        pairs = (f"{toml_text(key)} = {toml_text(item)}" for key, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_text, value)) + "]"
    return tomli_w.dumps({"value": value}).removeprefix("value = ").removesuffix("\n")


def wait_until_free(control: Path, seconds: float) -> None:
    """Return once nobody writes to the run; raise ``ConfigError`` if somebody still does then."""
    deadline = time.monotonic() + seconds
    while control.exists():
        try:
            lock_run(control).close()
            return
        except ConfigError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(1.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
