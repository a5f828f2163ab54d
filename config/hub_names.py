"""Names of the Hugging Face Hub in the configuration: ``hf:OWNER/NAME``, or with ``@REVISION``."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

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
