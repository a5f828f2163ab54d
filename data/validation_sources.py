"""Documents of ``[[validation.sources]]``, which are evaluated and never trained on."""

import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from config.job_config import Data, ValidationSource
from data.matching import file_id
from data.sources import (
    Reserved,
    ShuffledDocuments,
    Source,
    check_tokenizer,
    named_errors,
    open_documents,
)
from data.storage import DataPath
from data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from data.hub import HubStream


class ValidationData(NamedTuple):
    """Sources by name, each of which ends after its last document."""

    sources: dict[str, Source]
    reserved: Reserved
    """Their files."""


def build_validation_sources(
    configs: list[ValidationSource], data: Data, seed: int, tokenizer: Tokenizer
) -> ValidationData:
    """Open each source; ``data`` is what the run trains on.

    Raises ``ValueError`` for missing or bad data, ``OSError`` if reading fails.
    """
    found = ValidationData({}, Reserved({}, {}))
    for config in configs:
        with named_errors(f"validation.sources, {config.name}"):
            found.sources[config.name] = _build(config, data, seed, tokenizer, found.reserved)
    return found


def reserved_files(configs: list[ValidationSource], data: Data) -> Reserved:
    """Return the files of ``build_validation_sources`` that may hold text.

    Reads nothing of the Hub, and no token ids, which may be of a tokenizer that does not exist
    yet. Raises ``ValueError`` for missing or bad data, ``OSError`` if reading fails.
    """
    reserved = Reserved({}, {})
    for config in configs:
        with named_errors(f"validation.sources, {config.name}"):
            _check_is_apart(config, data)
            paths = _text_paths(config, skips_bad=data.on_bad_record == "skip")
            _reserve(config, paths, reserved)
    return reserved


def _text_paths(config: ValidationSource, *, skips_bad: bool) -> Sequence[DataPath]:
    if config.is_on_hub:
        is_local_copy = os.path.isdir(config.path)
        return _open_stream(config, skips_bad=skips_bad).paths if is_local_copy else []
    if config.type == "tokens" or config.is_outside:
        return []
    return open_documents(config, skips_bad=skips_bad)[0].paths


def _build(
    config: ValidationSource, data: Data, seed: int, tokenizer: Tokenizer, reserved: Reserved
) -> Source:
    skips_bad = data.on_bad_record == "skip"
    _check_is_apart(config, data)
    if config.is_on_hub:
        stream = _open_stream(config, skips_bad=skips_bad)
        _reserve(config, stream.paths, reserved)
        return stream
    check_tokens = partial(check_tokenizer, tokenizer=tokenizer, config=data)
    documents, fingerprint = open_documents(config, skips_bad=skips_bad, check_tokens=check_tokens)
    _reserve(config, documents.paths, reserved)
    return ShuffledDocuments(
        documents,
        None,
        seed=seed,
        name="validation",
        fingerprint=fingerprint,
        repeat=False,
        groups=documents.groups,
        paths=documents.paths,
        place=documents.place,
    )


def _check_is_apart(config: ValidationSource, data: Data) -> None:
    """Raise ``ValueError`` if the source has no files, and ``data`` has its documents too."""
    if config.is_on_hub and config.split == "train":
        # Imported here, because datasets takes a second to import.
        from data.hub import check_is_not_trained_on

        check_is_not_trained_on(config, data.mixture)
    if config.is_outside and any(
        (config.type, config.path, config.args) == (other.type, other.path, other.args)
        for other in data.mixture
    ):
        raise ValueError("data.type: its documents are also trained on")


def _open_stream(config: ValidationSource, *, skips_bad: bool) -> "HubStream":
    # Imported here, because datasets takes a second to import.
    from data.hub import validation_stream

    return validation_stream(config, skips_bad=skips_bad)


def _reserve(config: ValidationSource, paths: Sequence[DataPath], reserved: Reserved) -> None:
    files = {file_id(path): f"validation.sources, {config.name}" for path in paths}
    reserved.files.update(files)
    if config.exclude_from_training:
        reserved.excluded.update(files)
