"""Tools that train and compute nothing start at once: they import no torch."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lib.repository import ROOT
from tests.lib.saved import write_checkpoint

ATTEMPT = {
    "attempt": "a", "parent": None, "resumed_from": 0, "data_after": 0, "world_size": 1,
    "rank": 0, "dp_rank": 0, "n_rows": 1, "ramp": [],
}  # fmt: skip
STEP = {"step": 1, "rows": [[0, 0, 0, 0, 5, 1]], "loss": "0x1p0", "grad_norm": "0x1p0"}
# Each command, and what it may import of what is slow. RUN is a run's folder.
COMMANDS = {
    "tools.status RUN": set(),
    "tools.status RUN --json": set(),
    "tools.rollback RUN 1": set(),
    "tools.slurm_end RUN": set(),
    "tools.check_ledger RUN": {"numpy"},
    "tools.profile_summary --help": set(),
    "tools.report RUN -o RUN/report.html": {"pydantic"},
    "tools.report RUN -o RUN/report.html --png RUN": {"matplotlib", "numpy", "pydantic"},
    # Also in its workers.
    "tools.prepare RUN/tokens --data.source=files --data.path=RUN/*.toml": {"numpy", "pydantic"},
    "config help": {"pydantic"},
}
SLOW = {"torch", "numpy", "pydantic", "matplotlib", "transformers", "datasets", "tensorboard"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Folder of a run with one step: metrics, ledger, checkpoint."""
    for name in ("control", "ledger"):
        (tmp_path / name).mkdir()
    (tmp_path / "control" / "lock").touch()
    (tmp_path / "control" / "exit_code").write_text("0\n")
    line = {"step": 1, "loss": 2.0, "seconds_per_step": 1.0, "time": 1.0, "restarts": 0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "config.toml").write_text("[training]\nsteps = 1\n")
    lines = "".join(json.dumps(line) + "\n" for line in (ATTEMPT, STEP))
    (tmp_path / "ledger" / "rank-00000.jsonl").write_text(lines)
    write_checkpoint(tmp_path / "checkpoints" / "step-00000001")
    return tmp_path


def imported(command: str, run: Path) -> set[str]:
    """Packages of ``SLOW`` that the command imported until it ended, with success."""
    arguments = command.replace("RUN", str(run)).split()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return SLOW & set(re.findall(r"^import time:.*\| +(\w+)", done.stderr, flags=re.MULTILINE))


@pytest.mark.parametrize("command", COMMANDS)
def test_no_slow_package_is_imported(command: str, run: Path) -> None:
    assert imported(command, run) <= COMMANDS[command]


def test_slow_import_is_seen(run: Path) -> None:
    assert imported("tools.check_ledger RUN", run) == {"numpy"}
