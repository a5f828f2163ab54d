import subprocess
import sys
import tomllib
from importlib.metadata import version

import pytest

from runtime import release
from tests.test_import_rules import ROOT


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
def test_a_release_after_the_tested_ones_is_seen(
    installed: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "RELEASES", ("2.11.0", "2.15.0"))
    monkeypatch.setattr(release, "version", lambda package: installed)
    assert release.is_untested() == expected
    assert installed in release.about_torch()


def test_the_oldest_tested_release_is_the_oldest_that_installs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = release.RELEASES[0].removesuffix(".0")
    assert f"torch>={oldest}" in project["dependencies"]
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"torch=={release.RELEASES[1]}" in pinned


def ended(program: str) -> tuple[str, str]:
    """What a process prints, and what it complains of."""
    command = [sys.executable, "-c", f"from runtime.imports import *\nbegin_imports()\n{program}"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    return result.stdout, result.stderr


def test_an_error_of_an_import_names_the_release() -> None:
    _, complaint = ended("from torch import no_such_name")
    *_, error, note = complaint.splitlines()
    assert error.startswith("ImportError: cannot import name 'no_such_name'")
    assert note.startswith(f"torch {version('torch')}; tests were run on 2.11.0 to ")


GARBAGE = """
class Cycle:
    def __init__(self):
        self.own = self

    def __del__(self):
        print("found")

Cycle()
end_imports()
"""


def test_garbage_of_imports_is_found_at_the_end() -> None:
    """Else extension modules complain of what is left, after the last line of a run."""
    assert ended(GARBAGE) == ("found\n", "")
