"""The tests of tests/gpu_without_gpu run only on demand, and only where they can."""

import subprocess
import sys

import pytest
import torch

from tests.gpu_without_gpu import stub_library
from tests.lib.repository import ROOT


def test_plain_run_skips_the_tests_on_the_stub() -> None:
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "tests/gpu_without_gpu"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *_, summary = done.stdout.splitlines()
    assert "./run_tests.sh --gpu-stub runs it" in done.stdout
    assert "passed" not in summary
    assert "failed" not in summary


def test_missing_requirement_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is not a CUDA build" in stub_library.missing_requirement()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("PATH", "")
    assert stub_library.missing_requirement() == "there is no cc and no nm and no c++filt"
