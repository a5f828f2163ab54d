"""Names of the Hugging Face Hub in the configuration: ``hf:OWNER/NAME``, or with ``@REVISION``.

A run reads the local cache only, so no rank downloads anything: ``./shardloom fetch`` fills the
cache. Before ranks start, ``pin_names`` replaces each name by that of the commit in the cache. All
ranks, the run's ``config.toml`` and the manifests of its checkpoints then have the same commit.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from config import ConfigError, JobConfig
from runtime.run_folder import list_checkpoints

PREFIX = "hf:"
FORM = "hf:OWNER/NAME or hf:OWNER/NAME@REVISION"
NAME = re.compile(
    r"hf:(?P<repository>[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)"
    r"(?:@(?P<revision>\w[\w.-]*(?:/[\w.-]+)*))?",
    re.ASCII,
)
# Files of a repository, as patterns, that a key needs.
CONFIG_FILES = ("config.json",)
TOKENIZER_FILES = (
    *CONFIG_FILES,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "vocab.json",
    "tokenizer.model",
    "tiktoken.model",
    "*.tiktoken",
)
WEIGHT_FILES = (
    *TOKENIZER_FILES,
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*.safetensors",
)
INITIAL_LOAD_PATH = "checkpoint.initial_load_path"
FILES: Mapping[str, tuple[str, ...]] = {
    "data.tokenizer": TOKENIZER_FILES,
    "model.flavor": CONFIG_FILES,
    INITIAL_LOAD_PATH: WEIGHT_FILES,
}
"""The keys that may name a repository of the hub, and the files that each needs of it."""


@dataclass(frozen=True)
class HubName:
    """A repository of models at a revision: a branch, a tag or a commit; None: its main branch."""

    repository: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{PREFIX}{self.repository}" + (f"@{self.revision}" if self.revision else "")


def is_hub_name(text: str) -> bool:
    """True for ``hf:...``, well-formed or not. ``./hf:x`` is a file of that name."""
    return text.startswith(PREFIX)


def parse_hub_name(text: str) -> HubName:
    """Parse ``hf:OWNER/NAME[@REVISION]``. Raises ``ValueError`` for any other form."""
    found = NAME.fullmatch(text)
    if found is None or ".." in text or "--" in found["repository"]:
        raise ValueError(f"{text!r} is not of the form {FORM}")
    return HubName(found["repository"], found["revision"])


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
