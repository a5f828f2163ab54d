"""Decides keys that are "auto" before ranks start, so that all of them read the same values."""

import json
import os
import subprocess
import sys

from config import ConfigError, JobConfig
from config.auto import auto_keys, with_values
from runtime.imports import import_variables
from runtime.log import say, show_phase


def decide_auto(config: JobConfig, n_ranks: int, n_nodes: int) -> JobConfig:
    """Return ``config`` with values for its keys that are "auto". Raises ``ConfigError``.

    ``n_ranks``: ranks on each of ``n_nodes``. Nodes with other memory may decide otherwise; their
    ranks then end with an error that names the key.
    """
    keys = auto_keys(config)
    if not keys:
        return config
    show_phase(f"counting the memory of a step for {' and '.join(keys)}")
    request = {"config": config.model_dump(), "n_ranks": n_ranks, "world_size": n_ranks * n_nodes}
    done = subprocess.run(
        [sys.executable, "-m", "planner.auto"],
        env=os.environ | import_variables(os.environ),
        input=json.dumps(request),
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        *_, last = [f"exit code {done.returncode}", *done.stderr.strip().splitlines()]
        raise ConfigError([f'{keys[0]}: "auto" failed: {last}'])
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise ConfigError(answer["error"].splitlines())
    say(answer["text"])
    return with_values(config, answer["values"])
