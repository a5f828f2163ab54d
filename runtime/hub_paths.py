"""Local folders of names of the Hugging Face Hub, ``hf:OWNER/NAME@REVISION``.

A run reads the local cache only, so no rank downloads anything: ``./shardloom fetch`` fills the
cache. Before ranks start, ``pin_names`` replaces each name by that of the commit in the cache. All
ranks, the run's ``config.toml`` and the manifests of its checkpoints then have the same commit.
"""

from collections.abc import Iterable

from config import ConfigError, JobConfig
from config.hub_names import FILES, INITIAL_LOAD_PATH, HubName, is_hub_name, parse_hub_name
from runtime.run_folder import list_checkpoints


def local_path(text: str, files: tuple[str, ...], *, key: str) -> str:
    """Path of ``text``: itself, or the folder in the local cache if it is a name of the hub.

    Raises ``ValueError`` that begins with ``key`` if any of the repository's ``files`` is missing.
    """
    if not is_hub_name(text):
        return text
    # Imported here, because huggingface_hub takes a moment to import.
    from runtime.hub_cache import cached_folder

    try:
        return str(cached_folder(parse_hub_name(text), files))
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def pin_names(config: JobConfig, keys: Iterable[str] = FILES) -> JobConfig:
    """Replace each name of the hub by ``hf:OWNER/NAME@COMMIT``, the commit in the local cache.

    Raises ``ConfigError`` that says how to fetch what is missing. Weights may be missing once the
    run has a checkpoint, because they are not read again.
    """
    errors = []
    for key in keys:
        section, _, name = key.partition(".")
        table = getattr(config, section)
        if not is_hub_name(text := getattr(table, name)):
            continue
        try:
            folder = local_path(text, FILES[key], key=key)
        except ValueError as error:
            is_unused = key == INITIAL_LOAD_PATH and list_checkpoints(
                config.job.folder / "checkpoints"
            )
            errors += [] if is_unused else [str(error)]
            continue
        pinned = str(pinned_name(text, folder))
        config = config.model_copy(update={section: table.model_copy(update={name: pinned})})
    if errors:
        raise ConfigError(errors)
    return config


def pinned_name(text: str, folder: str) -> HubName:
    """Return the name ``text`` with the commit of ``folder``, its folder in the local cache."""
    return HubName(parse_hub_name(text).repository, folder.rpartition("/")[2])
