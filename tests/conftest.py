import logging
import signal
from collections.abc import Callable, Iterator

import pytest

from runtime.log import logger
from tests.ranks import RankPool

# Shells have what runs behind them ignore Ctrl-C, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="full counts of trials, not a tenth")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def trials(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """Of a full count of trials, how many to make now."""
    is_full = request.config.getoption("--full")
    return lambda count: count if is_full else max(1, count // 10)


@pytest.fixture
def seen(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Say what was seen, for the scorecard in docs/reliability.md."""
    return lambda text: request.node.user_properties.append(("seen", text))


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What is logged meanwhile, by the run's own logger too."""
    logger.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, logger=logger.name):
        yield caplog
    logger.removeHandler(caplog.handler)
