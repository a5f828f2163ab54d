"""Shell scripts are valid for bash and shellcheck, and reject settings that they would ignore."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lib.repository import ROOT

SCRIPTS = sorted(
    path.relative_to(ROOT)
    for pattern in ("*.sh", "shardloom", "slurm/*", "tools/*.sh")
    for path in ROOT.glob(pattern)
    if path.name != "site.sh"
)


def test_all_scripts_are_found() -> None:
    names = {"run_train.sh", "run_tests.sh", "slurm/train.sbatch", "slurm/site.example.sh"}
    assert names | {"shardloom", "tools/find_python.sh"} == set(map(str, SCRIPTS))


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_bash_parses_script(script: Path) -> None:
    subprocess.run(["bash", "-n", script], cwd=ROOT, check=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_shellcheck_has_no_findings(script: Path) -> None:
    installed = Path(sys.executable).with_name("shellcheck")
    program = installed if installed.exists() else shutil.which("shellcheck")
    if program is None:
        pytest.skip("shellcheck is not installed")
    command = [program, "--shell=bash", "--external-sources", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "setting", ["SITE=/no/such/site.sh", f"SITE={ROOT}", "SITE=~/site.sh", "PREFLIGHT=yes"]
)
def test_batch_script_rejects_settings_without_effect(setting: str) -> None:
    name, _, value = setting.partition("=")
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "node", "SLURM_SUBMIT_DIR": str(ROOT)}
    # Its interpreter cannot run, so that a script that goes on ends with another message.
    environment = {"PATH": os.environ["PATH"], "PYTHON": "/no/python", **job, name: value}
    script = ROOT / "slurm" / "train.sbatch"
    done = subprocess.run(["bash", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"slurm: {setting}: " in done.stdout
    assert "PYTHON" not in done.stderr
