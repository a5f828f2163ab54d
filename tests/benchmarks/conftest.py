from multiprocessing import get_context

import pytest

from benchmarks import turns
from tests.lib.ranks import PRELOADED


@pytest.fixture(autouse=True)
def warm_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes of loops from one that has imported PyTorch."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    monkeypatch.setattr(turns, "get_context", lambda _: context)
