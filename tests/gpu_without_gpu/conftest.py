"""These tests take minutes: they run with --gpu-stub only, and are skipped with the reason."""

from pathlib import Path

import pytest

from tests.gpu_without_gpu.stub_library import missing_requirement


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    own = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    if not own:
        return
    reason = "./run_tests.sh --gpu-stub runs it"
    if config.getoption("--gpu-stub"):
        reason = missing_requirement()
    for item in own:
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
