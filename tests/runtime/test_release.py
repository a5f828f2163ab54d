import subprocess
import sys
import tomllib
from importlib.metadata import version

import pytest

from runtime import release
from tests.lib.repository import ROOT


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ("2.15.0", False),
        ("2.15.0+cu132", False),
        ("2.11.0", False),
        ("2.12.0a0+5ff8b4a.nv26.05", False),
        ("2.15.1", True),
        ("2.16.0.dev20261201+cpu", True),
        ("3.0", True),
    ],
)
def test_newer_release_is_untested(
    installed: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "RELEASES", ("2.11.0", "2.15.0"))
    monkeypatch.setattr(release, "version", lambda package: installed)
    assert release.is_untested() == expected
    assert installed in release.torch_release()


def test_oldest_tested_release_is_the_oldest_required() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = release.RELEASES[0].removesuffix(".0")
    assert f"torch>={oldest}" in project["dependencies"]
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"torch=={release.RELEASES[1]}" in pinned


def run(program: str) -> tuple[str, str]:
    """Run ``program`` after ``begin_imports``; return stdout and stderr."""
    command = [sys.executable, "-c", f"from runtime.imports import *\nbegin_imports()\n{program}"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    return result.stdout, result.stderr


def test_import_error_names_the_release() -> None:
    _, stderr = run("from torch import no_such_name")
    *_, error, note = stderr.splitlines()
    assert error.startswith("  ImportError: cannot import name 'no_such_name'")
    assert note.startswith(f"  torch {version('torch')}; tested with 2.11.0 to ")


GARBAGE = """
class Cycle:
    def __init__(self):
        self.own = self

    def __del__(self):
        print("found")

Cycle()
end_imports()
"""


def test_garbage_of_imports_is_collected_at_exit() -> None:
    """Otherwise extension modules warn about leftover objects after a run's last line."""
    assert run(GARBAGE) == ("found\n", "")
