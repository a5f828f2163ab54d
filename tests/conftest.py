import gc
import logging
import os
import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest

from runtime.log import logger
from tests.lib.ranks import RankPool
from tests.lib.settings import restored_settings
from tests.lib.warm import WarmPopen

# Shells make background jobs ignore SIGINT, and processes started by tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Most of what imports and tests make stays: Python's 700, 10, 10 would visit it again and again.
gc.set_threshold(10_000, 10, 100)

# As in run_tests.sh. A process with threads of OpenMP cannot be forked.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nor one with the thread that pyarrow's allocator has.
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")
# Nor may one whose CUDA was asked for GPUs, as Inductor of PyTorch 2.11 asks when it is imported.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

# Files that run first: those that wait most, beside the longest of those that compute.
FIRST = (
    "tests/slurm/test_jobs.py",
    "tests/parallelisms/test_parity.py",
    "tests/test_meshes.py",
    "tests/slurm/test_cut_link.py",
    "tests/parallelisms/test_documents.py",
    "tests/runtime/test_compat.py",
    "tests/parallelisms/test_materialize.py",
    "tests/reliability/test_planted.py",
    "tests/reliability/test_resume.py",
    "tests/parallelisms/test_float8_all_gather.py",
    "tests/reliability/test_nodes.py",
    "tests/test_docs.py",
    "tests/test_data_runs.py",
    "tests/reliability/test_chaos.py",
    "tests/parallelisms/test_float8.py",
    "tests/reliability/test_numerics.py",
    "tests/parallelisms/test_same_curve.py",
    "tests/tools/test_convert.py",
    "tests/test_train.py",
    "tests/tools/test_preflight.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {file: number for number, file in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(item.location[0], len(order)))


def pytest_collection_finish() -> None:
    # What was imported stays; collections need not visit it again.
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="full counts of trials, not a tenth")
    parser.addoption("--gpu-stub", action="store_true", help="run tests/gpu_without_gpu, too")
    parser.addoption("--seed", type=int, help="only this trial of tests with seeds")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def unchanged_settings() -> Iterator[None]:
    with restored_settings():
        yield


@pytest.fixture
def warm_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start Python on this repository's programs by a process that has imported PyTorch."""
    monkeypatch.setattr(subprocess, "Popen", WarmPopen)


@pytest.fixture(scope="session")
def trials(request: pytest.FixtureRequest) -> Callable[..., int]:
    """Return the number of trials: the full count with --full, else a tenth or ``usually``."""
    is_full = request.config.getoption("--full")

    def number(count: int, usually: int | None = None) -> int:
        return count if is_full else usually or max(1, count // 10)

    return number


@pytest.fixture
def seeds(
    request: pytest.FixtureRequest, trials: Callable[[int], int]
) -> Iterator[Callable[..., Iterator[int]]]:
    """Iterate over the seeds of ``count`` trials; without --full a tenth of them, or ``usually``.

    With --seed only over that one. If a trial fails, the command that repeats it is printed.
    """
    only, unfinished = request.config.getoption("--seed"), list[int]()

    def iterate(count: int, usually: int | None = None) -> Iterator[int]:
        is_few = usually is not None and not request.config.getoption("--full")
        for seed in range(usually if is_few else trials(count)) if only is None else [only]:
            unfinished[:] = [seed]
            yield seed
        unfinished.clear()

    yield iterate
    for seed in unfinished:
        print(f"reproduce: ./run_tests.sh -n 0 '{request.node.nodeid}' --seed {seed}")


@pytest.fixture
def record_result(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Record a result for the scorecard in docs/scorecard.md."""
    return lambda text: request.node.user_properties.append(("result", text))


@pytest.fixture
def captured_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Capture log records, including those of Shardloom's logger."""
    logger.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, logger=logger.name):
        yield caplog
    logger.removeHandler(caplog.handler)
