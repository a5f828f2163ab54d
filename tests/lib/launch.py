"""Small runs as users start them, by run_train.sh, and their metrics."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from runtime.imports import import_variables
from shardloom import command_line
from tests.lib.patience import PATIENCE_SECONDS
from tests.lib.repository import ROOT
from tests.lib.warm import WarmPopen

SMALL = {
    "model.args.n_layers": "2",
    "training.seq_len": "32",
    "training.local_batch_size": "2",
    "training.global_batch_size": "8",
    "training.dtype": "float64",
    "metrics.log_freq": "1",
    "metrics.trackers": "[]",
    "validation.freq": "1000",
    "validation.steps": "1",
    "validation.sample_tokens": "0",
    "lr_scheduler.warmup_steps": "2",
    "lr_scheduler.total_steps": "12",
}

# A run that lasts until a test ends it, and leaves the CPUs to the others meanwhile.
LONG = {
    "model.name": "tests.lib.paced:PACED",
    "training.steps": "100000",
    "lr_scheduler.total_steps": "100000",
}

CRASHING_MODEL = """
from dataclasses import replace

from models.llama3 import SPEC
from models.transformer import Transformer


class Crashes(Transformer):
    def forward(self, *inputs):
        raise RuntimeError("planted")


CRASHES = replace(SPEC, model_cls=Crashes)
"""


def small_keys(folder: Path, overrides: Mapping[str, str]) -> dict[str, str]:
    """Keys of a small run in ``folder``, and ``overrides``."""
    # One layer of each kind.
    hybrid = (
        {"model.args.attention_every": "2"} if overrides.get("model.name") == "qwen3_next" else {}
    )
    return SMALL | hybrid | {"job.output_dir": str(folder)} | overrides


def plant_crashing_model(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Write a model that crashes in its first step; return environment and keys that train it."""
    (folder / "planted.py").write_text(CRASHING_MODEL)
    return {"PYTHONPATH": str(folder)}, {"model.name": "planted:CRASHES"}


def start(
    folder: Path,
    n_ranks: int,
    *,
    terminal: int | None = None,
    root: Path = ROOT,
    cwd: Path | None = None,
    is_warm: bool = True,
    environment: Mapping[str, str] = MappingProxyType({}),
    **overrides: str,
) -> subprocess.Popen[str]:
    """Start a run; its output goes to a pipe, or to the file descriptor ``terminal``.

    ``root``: the repository. ``is_warm``: skip the shell and the imports, which ``run_train.sh``
    starts with. ``environment`` is added to this process's.
    """
    keys = small_keys(folder, overrides)
    arguments = [part for key, value in keys.items() for part in (f"--{key}", value)]
    own = {"PYTHON": sys.executable, "NGPU": str(n_ranks), **environment}
    variables = os.environ | own
    command = [str(root / "run_train.sh"), *arguments]
    if is_warm and root == ROOT and terminal is None:
        command, variables = (
            command_line("train", arguments),
            variables | import_variables(variables),
        )
    return WarmPopen(
        command,
        cwd=cwd,
        env=variables,
        stdout=subprocess.PIPE if terminal is None else None,
        stderr=subprocess.STDOUT if terminal is None else None,
        text=True,
        start_new_session=terminal is None,
        preexec_fn=None if terminal is None else partial(_log_in, terminal),
    )


def _log_in(terminal: int) -> None:
    # A program that nohup started ignores it, and a process inherits that.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.login_tty(terminal)


def run(folder: Path, n_ranks: int, **overrides: str) -> str:
    process = start(folder, n_ranks, **overrides)
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, output
    return output


def records(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "debug_model" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def curve(folder: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of each step, from its last training."""
    found = {r["step"]: (r["loss"], r["grad_norm"]) for r in records(folder) if "loss" in r}
    return dict(sorted(found.items()))


def without_slow_phases(output: str) -> str:
    """Output of a launcher without the phases of its start, which a pipe gets if they are slow."""
    return re.sub(r"^.* start: .*\n", "", output, flags=re.MULTILINE)


def wait_for_steps(folder: Path, process: subprocess.Popen[str], n_lines: int = 5) -> None:
    metrics = folder / "debug_model" / "metrics.jsonl"
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not metrics.exists() or len(metrics.read_text().splitlines()) < n_lines:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no steps in two minutes"
        time.sleep(0.1)
