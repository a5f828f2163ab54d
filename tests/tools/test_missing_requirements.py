"""Missing requirements are reported, and pinned versions satisfy pyproject.toml."""

import re
import tomllib
from importlib.metadata import version

import pytest

from tests.lib.repository import ROOT
from tools.missing_requirements import missing

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = sum(PROJECT["optional-dependencies"].values(), PROJECT["dependencies"])
PINNED = {
    re.sub(r"[-_.]+", "-", name.lower()): pinned
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if not line.startswith("#")
    for name, pinned in [line.split("==")]
}


def test_installed_requirement_is_not_missing():
    assert missing([f"pytest>={version('pytest')}", "pytest[dev]>=1.0"]) == []


@pytest.mark.parametrize("requirement", ["pytest>=9999.0", "no-such-package-here>=0.1"])
def test_older_or_absent_requirement_is_missing(requirement: str):
    assert missing(["pytest>=1.0", requirement]) == [requirement]


@pytest.mark.parametrize(
    ("installed", "minimum", "is_enough"),
    [
        ("2.10.0", "2.9", True),
        ("2.9.1", "2.10", False),
        ("2.13.0+cpu", "2.13.0", True),
        ("2.13+cu130", "2.13.1", False),
        ("2.11.0a0+git1234", "2.11", True),
        ("2.11", "2.11", True),
        ("3.0", "2.11.5", True),
        # Of damaged metadata.
        (None, "2.11", False),
    ],
)
def test_versions_compare_as_numbers(
    installed: str | None, minimum: str, is_enough: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tools.missing_requirements.version", lambda _: installed)
    assert (missing([f"torch>={minimum}"]) == []) == is_enough


@pytest.mark.parametrize("requirement", REQUIREMENTS)
def test_pin_satisfies_every_requirement(requirement: str, monkeypatch: pytest.MonkeyPatch):
    # The only form that missing() parses.
    assert re.fullmatch(r"[a-z][a-z0-9-]*(\[[a-z0-9]+\])?>=\d+(\.\d+)*", requirement)
    monkeypatch.setattr("tools.missing_requirements.version", PINNED.__getitem__)
    assert missing([requirement]) == []
