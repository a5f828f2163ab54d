"""No row of the support tables is dead or said twice, and the documentation is a copy of it."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from config import ConfigError, JobConfig, load_config
from config.job_config import Parallelism
from models import find_model
from parallelisms.support import check_support
from tests.config.test_bad_configs import BAD, Bad, write
from tools.support_table import PAGE, ROWS, support_text

MESSAGES = [f"{row.key}: {row.reason}" for row in ROWS]


def refused(bad: Bad, folder: Path) -> list[str]:
    """What the support table has against ``bad``; nothing if it does not come that far."""
    try:
        config = load_config(write(folder, bad.toml), bad.overrides)
        _, args = find_model(config.model.name, config.model.flavor)
    except ValueError:
        return []
    with pytest.raises(ConfigError) as caught:
        check_support(config, args, bad.ranks, has_gpu=False)
    return caught.value.messages


def test_every_row_is_met_by_a_bad_configuration(tmp_path: Path):
    met = {message for bad in BAD for message in refused(bad, tmp_path)}
    # Some end with what does not fit.
    met |= {message.rpartition(" (")[0] for message in met}
    assert [message for message in MESSAGES if message not in met] == []


def test_no_row_twice():
    assert len(set(MESSAGES)) == len(MESSAGES)


def test_what_is_not_in_the_table_runs():
    config = JobConfig()
    _, args = find_model(config.model.name, config.model.flavor)
    for world_size in (1, 2, 3, 8, 1024):
        assert check_support(config, args, world_size, has_gpu=True).dp_shard == world_size


@dataclass(frozen=True)
class Shape:
    n_layers: int = 8
    n_heads: int = 8
    n_kv_heads: int = 8
    head_dim: int = 1
    hidden_dim: int = 8


@pytest.mark.parametrize("size", ["n_heads", "n_kv_heads", "hidden_dim"])
def test_tensor_parallel_has_to_divide_each_size_of_the_model(size: str):
    config = JobConfig(parallelism=Parallelism(tensor_parallel_degree=4))
    assert check_support(config, Shape(), world_size=4, has_gpu=True).tp == 4
    with pytest.raises(ConfigError) as caught:
        check_support(config, Shape(**{size: 6}), world_size=4, has_gpu=True)
    (message,) = caught.value.messages
    assert f"the model's {size}" in message
    assert message.endswith("(4 does not divide 6)")


def test_the_page_is_current():
    assert PAGE.read_text() == support_text(), "run: python -m tools.support_table"
