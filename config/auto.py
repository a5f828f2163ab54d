"""Keys that may be "auto": decided from the memory of a rank, before ranks start."""

from collections.abc import Mapping
from typing import Any

from config.constraints import CONFIG_CONSTRAINTS
from config.errors import ConfigError
from config.job_config import JobConfig

SIZE, MODE = "training.local_batch_size", "activation_checkpoint.mode"
# What "auto" chooses from, least recomputation first.
MODES = ("none", "selective", "full")


def auto_keys(config: JobConfig) -> list[str]:
    """Return the keys of ``config`` that are "auto"."""
    values = {SIZE: config.training.local_batch_size, MODE: config.activation_checkpoint.mode}
    return [key for key, value in values.items() if value == "auto"]


def with_values(config: JobConfig, values: Mapping[str, Any]) -> JobConfig:
    """Return ``config`` with other ``values`` by key."""
    for key, value in values.items():
        table, name = key.split(".")
        section = getattr(config, table).model_copy(update={name: value})
        config = config.model_copy(update={table: section})
    return config


def candidates(config: JobConfig) -> list[JobConfig]:
    """Return ``config`` with each choice for the mode, and the smallest microbatch, for "auto".

    Least recomputation first; [``config``] if nothing is "auto". Raises ``ConfigError``.
    """
    keys = auto_keys(config)
    if not keys:
        return [config]
    if found := [row.message(config) for row in CONFIG_CONSTRAINTS if row.violated(config)]:
        raise ConfigError(found)
    size = {SIZE: 1} if SIZE in keys else {}
    modes = [{MODE: mode} for mode in MODES] if MODE in keys else [{}]
    return [with_values(config, size | mode) for mode in modes]
