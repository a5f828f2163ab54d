"""The tests of tests/gpu_without_gpu run only on demand, and only where they can."""

from unittest.mock import Mock

import pytest
import torch

from tests.gpu_without_gpu import conftest, stub_library
from tests.lib.repository import ROOT


def test_plain_run_skips_the_tests_on_the_stub() -> None:
    folder = ROOT / "tests" / "gpu_without_gpu"
    inside, outside = (Mock(path=path / "test_it.py") for path in (folder, folder.parent))
    conftest.pytest_collection_modifyitems(Mock(getoption=lambda name: False), [inside, outside])
    (mark,) = inside.add_marker.call_args.args
    assert (mark.name, mark.kwargs) == ("skip", {"reason": "./run_tests.sh --gpu-stub runs it"})
    outside.add_marker.assert_not_called()


def test_missing_requirement_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is not a CUDA build" in stub_library.missing_requirement()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("PATH", "")
    assert stub_library.missing_requirement() == "there is no cc and no nm and no c++filt"
