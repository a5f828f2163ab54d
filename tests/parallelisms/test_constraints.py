"""Tests that each constraint is reachable, unique and listed in docs/reference/constraints.md."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from config import ConfigError, JobConfig, load_config
from config.job_config import Parallelism
from models import find_model
from parallelisms.constraints import check_constraints
from run_spec import resolve
from tests.lib.configs import BAD, Bad, write
from tools.constraints_table import PAGE, ROWS, constraints_page

MESSAGES = [f"{row.key}: {row.reason}" for row in ROWS]


def violations(bad: Bad, folder: Path) -> list[str]:
    """Return the constraints that ``bad`` violates; none if loading it fails already."""
    try:
        config = load_config(write(folder, bad.toml), bad.overrides)
        _, args = find_model(config.model.name, config.model.flavor)
    except ValueError:
        return []
    with pytest.raises(ConfigError) as caught:
        check_constraints(config, args, bad.ranks, has_gpu=False)
    return caught.value.messages


def test_each_constraint_has_a_bad_config(tmp_path: Path):
    found = {message for bad in BAD for message in violations(bad, tmp_path)}
    # Some messages end with the values in parentheses.
    found |= {message.rpartition(" (")[0] for message in found}
    assert [message for message in MESSAGES if message not in found] == []


def test_constraints_are_unique():
    assert len(set(MESSAGES)) == len(MESSAGES)


def test_default_config_violates_nothing():
    config = JobConfig()
    _, args = find_model(config.model.name, config.model.flavor)
    for world_size in (1, 2, 3, 8, 1024):
        assert check_constraints(config, args, world_size, has_gpu=True).dp_shard == world_size


@dataclass(frozen=True)
class Shape:
    n_layers: int = 8
    n_heads: int = 8
    n_kv_heads: int = 8
    head_dim: int = 1
    hidden_dim: int = 8


@pytest.mark.parametrize("size", ["n_heads", "n_kv_heads", "hidden_dim"])
def test_tensor_parallel_must_divide_each_model_size(size: str):
    config = JobConfig(parallelism=Parallelism(tensor_parallel_degree=4))
    assert check_constraints(config, Shape(), world_size=4, has_gpu=True).tp == 4
    with pytest.raises(ConfigError) as caught:
        check_constraints(config, Shape(**{size: 6}), world_size=4, has_gpu=True)
    (message,) = caught.value.messages
    assert f"the model's {size}" in message
    assert message.endswith("(4 does not divide 6)")


def test_float8_needs_a_gpu_that_has_it_where_the_run_trains(monkeypatch: pytest.MonkeyPatch):
    """A plan is of another machine's GPUs."""
    config = load_config(Path("debug_model"), ["--float8.recipe", "tensorwise"])
    _, args = find_model("llama3", "debugmodel", {})
    with pytest.raises(ConfigError, match=r"requires an NVIDIA GPU of CUDA capability 8\.9"):
        check_constraints(config, args, 1, has_gpu=True, lacks_float8=True)
    monkeypatch.setattr("runtime.torch_device.lacks_float8", lambda: True)
    resolve(config, 1, has_gpu=True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"requires an NVIDIA GPU of CUDA capability 8\.9"):
        resolve(config, 1)


def test_support_page_is_current():
    assert PAGE.read_text() == constraints_page(), "run: python -m tools.constraints_table"
