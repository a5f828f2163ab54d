"""Shell scripts are valid for bash and shellcheck."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lib.repository import ROOT

SCRIPTS = sorted(
    path.relative_to(ROOT)
    for pattern in ("*.sh", "slurm/*", "tools/*.sh")
    for path in ROOT.glob(pattern)
    if path.name != "site.sh"
)


def test_all_scripts_are_found() -> None:
    names = {"run_train.sh", "run_tests.sh", "slurm/train.sbatch", "slurm/site.example.sh"}
    assert names | {"tools/find_python.sh"} == set(map(str, SCRIPTS))


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
