"""Configuration of a run: ``JobConfig``, its loader, and the error of an invalid one."""

from typing import TYPE_CHECKING, Any

from config.errors import ConfigError

if TYPE_CHECKING:
    from config.job_config import JobConfig
    from config.loader import dump_toml, find_run_folder, load_config

__all__ = ["ConfigError", "JobConfig", "dump_toml", "find_run_folder", "load_config"]


def __getattr__(name: str) -> Any:
    # Importing pydantic takes longer than all that a tool does that only reads a run's folder.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from config import loader

    return getattr(loader, name)
