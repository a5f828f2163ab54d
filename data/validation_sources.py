"""Documents of ``[[validation.sources]]``, which are evaluated and never trained on."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np

from config.job_config import Data, ValidationSource
from data.matching import file_id
from data.sources import (
    Owners,
    ShuffledDocuments,
    Source,
    check_tokenizer,
    open_documents,
)
from data.tokenizer import Tokenizer


class ValidationData(NamedTuple):
    """Sources by name, each of which ends after its last document."""

    sources: dict[str, Source]
    reserved: Owners
    """All files of these sources."""
    excluded: Owners
    """Those that training omits; the others must not match its patterns."""


def build_validation_sources(
    configs: list[ValidationSource], data: Data, seed: int, tokenizer: Tokenizer
) -> ValidationData:
    """Open each source; ``data`` is what the run trains on.

    Raises ``ValueError`` for missing or bad data, ``OSError`` if reading fails.
    """
    found = ValidationData({}, {}, {})
    for config in configs:
        with _with_name(config):
            found.sources[config.name] = _build(config, data, seed, tokenizer, found)
    return found


def _build(
    config: ValidationSource, data: Data, seed: int, tokenizer: Tokenizer, found: ValidationData
) -> Source:
    skips_bad = data.on_bad_record == "skip"
    if config.is_on_hub:
        # Imported here, because datasets takes a second to import.
        from data.hub import validation_stream

        return validation_stream(config, data.mixture, skips_bad=skips_bad)
    if config.is_outside and any(
        (config.type, config.path, config.args) == (other.type, other.path, other.args)
        for other in data.mixture
    ):
        raise ValueError("data.type: its documents are also trained on")
    check_tokens = partial(check_tokenizer, tokenizer=tokenizer, config=data)
    documents, fingerprint = open_documents(config, skips_bad=skips_bad, check_tokens=check_tokens)
    files = {file_id(path): f"validation.sources, {config.name}" for path in documents.paths}
    found.reserved.update(files)
    if config.exclude_from_training:
        found.excluded.update(files)
    return ShuffledDocuments(
        documents,
        np.arange(len(documents)),
        seed=seed,
        name="validation",
        fingerprint=fingerprint,
        repeat=False,
        groups=documents.groups,
        paths=documents.paths,
        place=documents.place,
    )


@contextmanager
def _with_name(config: ValidationSource) -> Iterator[None]:
    """Prefix errors with the name of the source."""
    try:
        yield
    except (ValueError, OSError) as error:
        kind = ValueError if isinstance(error, ValueError) else OSError
        text = str(error).removeprefix("data.")
        raise kind(f"validation.sources, {config.name}: {text}") from None
