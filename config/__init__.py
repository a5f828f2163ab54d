from config.job_config import JobConfig
from config.loader import ConfigError, dump_toml, load_config

__all__ = ["ConfigError", "JobConfig", "dump_toml", "load_config"]
