"""Datasets of the Hugging Face Hub, and the cache of converted files, through ``datasets``."""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import datasets
import numpy as np
import pyarrow as pa

from config import JobConfig, load_config
from config.job_config import DataSource, DocumentSource, ValidationSource
from data.columns import check_column, check_no_null
from data.files import order_fingerprints, record_hashes
from data.formats import Format
from data.records import read_records
from data.remote_errors import TRANSIENT, StorageError
from data.storage import DataPath, version_keys, versioned_path

S = TypeVar("S", bound=DocumentSource)

COMMIT = re.compile("[0-9a-f]{40}")
C4 = ("allenai/c4", "en", "text")
# Of Python, requests and httpx, by name because either library may be installed.
NETWORK_ERRORS = {"ConnectionError", "TimeoutError", "Timeout", "TransportError"}


class Part(NamedTuple):
    """Texts of a stream on one side of the held-out split, decided by a hash of the text."""

    percent: float
    is_held_out: bool

    def has(self, text: Any) -> bool:
        """Return True if the text is in this part; records without text are not held out."""
        if not isinstance(text, str):
            return not self.is_held_out
        digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
        is_held_out = int.from_bytes(digest, "little") < self.percent / 100 * 2**64
        return is_held_out == self.is_held_out

    def __str__(self) -> str:
        return f", {self.percent if self.is_held_out else 100 - self.percent:g} %"


class HubTable:
    """Split "train" of a hub dataset, downloaded completely and memory-mapped."""

    groups = None

    def __init__(self, config: DocumentSource, *, skips_bad: bool = False) -> None:
        name, subset, text_key = _hub_name(config)
        with _loading(f"{name} (train)"):
            builder = _builder(config)
            builder.download_and_prepare()
            table = builder.as_dataset(split="train").data
        check_column(table.schema, text_key, name)
        self._column = table.column(text_key)
        if not skips_bad:
            check_no_null(self._column, text_key, name)
        self.name, self._key = f"{name}/{subset}/{text_key}", name
        self.paths = _local_files(builder, name, "train")
        self.identity = f"{_identity(builder, name, self.paths)}/{subset}/{text_key}"
        if not os.path.isdir(name):
            # This text is in the folders of tokens that were prepared before.
            self.identity = self.name + builder.hash

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, index: int) -> str | None:
        return self._column[index].as_py()

    def place(self, index: int) -> str:
        return f"{self.name}, row {index}"

    @property
    def split_hashes(self) -> np.ndarray:
        return record_hashes(self._key, len(self))


class HubStream:
    """Streams one split of a hub dataset in its stored order, the same every epoch.

    Each row of the batch reads its own files. If there are fewer files than rows, rows that share
    files alternate. Resume re-reads and discards all documents before the row's position.
    """

    n_documents = None

    def __init__(
        self,
        config: DocumentSource,
        split: str,
        *,
        part: Part | None = None,
        repeat: bool = True,
        skips_bad: bool = False,
    ) -> None:
        """``part``: the part of the split to read; None: all."""
        name, subset, text_key = _hub_name(config)
        self._text_key, self._repeat, self._skips_bad = text_key, repeat, skips_bad
        self._part = part
        with _loading(f"{name} ({split})"):
            builder = _builder(config)
            self._dataset = builder.as_streaming_dataset(split=split)
        self.paths = _local_files(builder, name, split)
        self.held_out_paths = _local_files(builder, name, "validation") if split == "train" else []
        """Files of a local copy that no source may train on, also without validation."""
        commit = "" if os.path.isdir(name) else f"@{builder.hash}"
        self.description = f"{name}{commit} {subset} ({split}{part or ''}), streamed"
        parts = f"{_identity(builder, name, self.paths)}/{subset}/{split}{part or ''}/{text_key}"
        self.fingerprint, self.resumable_fingerprints = order_fingerprints(parts, repeat=repeat)

    def changed_since(self, seconds: float) -> list[DataPath]:
        """Files of a local copy; a dataset of the Hub stays at its commit."""
        return [path for path in self.paths if path.stat().st_ctime > seconds]

    def place(self, row: int, n_rows: int, number: int) -> str:
        return ""

    def documents(self, row: int, n_rows: int, start: int) -> Iterator[str | None]:
        n_shards = min(n_rows, self._dataset.num_shards)
        index, turn = row % n_shards, row // n_shards
        n_turns = len(range(index, n_rows, n_shards))
        shard = self._dataset.shard(n_shards, index)
        number = 0
        while True:
            first = number
            records = filter(self._belongs, shard)
            for record in self._read(islice(records, turn, None, n_turns), row, number):
                text = record.get(self._text_key)
                if number >= start and (isinstance(text, str) or self._skips_bad):
                    yield text if isinstance(text, str) else None
                elif number >= start:
                    where = f"{self._text_key!r} of document {number} of row {row}"
                    raise ValueError(f"data.text_key: {where} is {text!r}, not text")
                number += 1
            if number == first and self._repeat:
                text = f"{self.description}: no document for row {row} of {n_rows}"
                raise ValueError(f"data.path: {text}")
            if not self._repeat:
                return

    def _belongs(self, record: dict[str, Any]) -> bool:
        return self._part is None or self._part.has(record.get(self._text_key))

    def _read(
        self, records: Iterator[dict[str, Any]], row: int, number: int
    ) -> Iterator[dict[str, Any]]:
        """Add the document to errors: ``ValueError`` for bad contents, else ``OSError``."""
        try:
            for record in records:
                yield record
                number += 1
        except Exception as error:  # datasets raises its own, pyarrow's and the network's errors
            kind = ValueError if isinstance(error, ValueError) else OSError
            where = f"{self.description}: document {number} of row {row}"
            raise kind(f"data.path: {where} cannot be read: {error!r}") from error


def hub_streams(
    config: DataSource, with_held_out: bool, percent: float, *, skips_bad: bool
) -> tuple[HubStream, HubStream | None]:
    """Open the split "train" of a hub dataset and, if ``with_held_out``, its held-out texts.

    These are the split "validation", or ``percent`` of "train" where there is none.
    """
    splits = _splits(config, "train")
    build = partial(HubStream, config, skips_bad=skips_bad)
    if with_held_out and "validation" not in splits and percent == 0:
        text = f"must be greater than 0, because {_hub_name(config)[0]} has no split validation"
        raise ValueError(f"data.validation_percent: {text}")
    if "validation" in splits or percent == 0:
        train = build("train", repeat=config.repeat)
        return train, build("validation", repeat=False) if with_held_out else None
    train = build("train", part=Part(percent, is_held_out=False), repeat=config.repeat)
    if not with_held_out:
        return train, None
    return train, build("train", part=Part(percent, is_held_out=True), repeat=False)


def pin_datasets(config: JobConfig) -> JobConfig:
    """Set the ``revision`` of each dataset of the Hub to its commit, in all starts of a run alike.

    That is the one in the run's ``config.toml``, or else the newest.
    """
    saved: list[DocumentSource] = []
    # Without it, fingerprints tell whether the newest commit is that of the checkpoint.
    with suppress(OSError, ValueError):
        before = load_config(config.job.folder / "config.toml", [])
        saved = [*before.data.mixture, *before.validation.sources]

    def pin(source: S) -> S:
        return source.model_copy(update={"revision": _commit(source, saved)})

    own = [pin(source) for source in config.data.mixture]
    data = {"sources": own} if config.data.sources else {"revision": own[0].revision}
    sources = [pin(source) for source in config.validation.sources]
    return config.model_copy(
        update={
            "data": config.data.model_copy(update=data),
            "validation": config.validation.model_copy(update={"sources": sources}),
        }
    )


def _commit(config: DocumentSource, saved: Iterable[DocumentSource]) -> str:
    """Commit of a dataset of the Hub; "" for a local copy, and for files."""
    if not config.is_on_hub:
        return ""
    name, subset, _ = _hub_name(config)
    if os.path.isdir(name):
        if config.revision:
            raise ValueError(f"data.revision: has no effect for the folder {name}")
        return ""
    # Another source of the dataset may have another revision: first the one that is this one.
    ordered = sorted(saved, key=lambda s: (type(s), s.label) != (type(config), config.label))
    before = (s.revision for s in ordered if s.is_on_hub and _hub_name(s)[:2] == (name, subset))
    revision = config.revision or next(before, "")
    with _loading(name):
        return _builder(config.model_copy(update={"revision": revision})).hash


def _builder(config: DocumentSource) -> Any:
    """Open a dataset. Raises ``ConnectionError`` if the cache has another commit of it."""
    name, subset, _ = _hub_name(config)
    found = datasets.load_dataset_builder(name, subset or None, revision=config.revision or None)
    # Without network, datasets takes the newest in its cache.
    if COMMIT.fullmatch(config.revision) and found.hash != config.revision:
        text = f"the cache has only commit {found.hash}, not {config.revision}"
        raise ConnectionError(f"no network, and {text}")
    return found


def _local_files(builder: Any, name: str, split: str) -> list[Path]:
    """Sorted files of a split of a local copy; [] for a dataset of the Hub."""
    if not os.path.isdir(name):
        return []
    return sorted(map(Path, builder.config.data_files.get(split, [])))


def _identity(builder: Any, name: str, paths: Sequence[Path]) -> str:
    """Text that is equal for the same version of a dataset: its commit, or sizes of local files."""
    if not os.path.isdir(name):
        return f"{name}@{builder.hash}"
    folder = os.path.realpath(name)
    return "\n".join(f"{os.path.relpath(path, folder)} {path.stat().st_size}" for path in paths)


def check_is_not_trained_on(config: DocumentSource, trained: Iterable[DataSource]) -> None:
    """Raise ``ValueError`` if a source of ``trained`` reads the hub dataset of ``config``."""
    name, subset, _ = _hub_name(config)
    others = [_hub_name(source)[:2] for source in trained if source.is_on_hub]
    subsets = {other for found, other in others if _repository(found) == _repository(name)}
    if subsets and subset not in subsets and "" in subsets | {subset}:
        with _loading(name):
            revision = config.revision or None
            default = datasets.get_dataset_default_config_name(name, revision=revision) or ""
        subset, subsets = subset or default, {other or default for other in subsets}
    if subset in subsets:
        raise ValueError(f"data.split: train of {name} is also trained on")


def _repository(name: str) -> str:
    """Return the same text for all names of a dataset: those of the Hub have no case."""
    return os.path.realpath(name) if os.path.isdir(name) else name.strip("/").casefold()


def validation_stream(config: ValidationSource, *, skips_bad: bool) -> HubStream:
    """Open one split of a hub dataset, once."""
    _splits(config, config.split)
    return HubStream(config, config.split, repeat=False, skips_bad=skips_bad)


def _splits(config: DocumentSource, wanted: str) -> list[str]:
    """Names of a dataset's splits. Raises ``ValueError`` if ``wanted`` is not one of them."""
    name, subset, _ = _hub_name(config)
    with _loading(name):
        splits: list[str] = datasets.get_dataset_split_names(
            name, subset or None, revision=config.revision or None
        )
    if wanted not in splits:
        raise ValueError(f"data.path: {name} has no split {wanted}, only {', '.join(splits)}")
    return splits


def convert_records(
    path: DataPath, file_format: Format, text_key: str, *, skips_bad: bool
) -> pa.ChunkedArray:
    """Convert the texts of a JSON or CSV file to Arrow in the cache of ``datasets``; map them.

    An earlier conversion is used again. With ``skips_bad``, bad records are null. Raises
    ``ValueError`` for bad records and broken files, ``OSError`` if the cache cannot be written.
    """
    # datasets finds an earlier conversion by these.
    keys = version_keys(path) | {"file_format": file_format}
    keys |= {"text_key": text_key, "skips_bad": skips_bad}
    if next(_texts(**keys), None) is None:
        # datasets fails without rows.
        return pa.chunked_array([], pa.large_string())
    features = datasets.Features({text_key: datasets.Value("large_string")})
    try:
        table = datasets.Dataset.from_generator(_texts, features=features, gen_kwargs=keys)
    except Exception as error:  # datasets raises its own and pyarrow's errors
        _raise_cache_error(error)
        raise ValueError(str(error.__cause__ or repr(error))) from error
    return table.data.column(text_key)


def _texts(
    path: str, file_format: Format, text_key: str, skips_bad: bool, size: int, time: str
) -> Iterator[dict[str, str | None]]:
    for record in read_records(versioned_path(path, size, time), file_format, text_key):
        if record.error and not skips_bad:
            raise ValueError(record.error)
        yield {text_key: record.text}


def _hub_name(config: DocumentSource) -> tuple[str, str, str]:
    """(dataset, configuration, text column) of ``config``."""
    return C4 if config.type == "c4" else (config.path, config.subset, config.text_key)


@contextmanager
def _loading(what: str) -> Iterator[None]:
    """Name the dataset in errors: ``OSError`` for those that a later try may not meet."""
    try:
        yield
    except Exception as error:  # datasets raises its own and the network's errors
        _raise_cache_error(error)
        kind = OSError if _may_pass(error) else ValueError
        raise kind(f"data.path: cannot load {what}: {error}") from error


def _may_pass(error: BaseException | None) -> bool:
    """True if ``error``, or one that it came from, is of the network or of a busy server."""
    if datasets.config.HF_HUB_OFFLINE:  # The user forbids the network, also at a restart.
        return False
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", 0)
        names = {base.__name__ for base in type(error).__mro__}
        if names & NETWORK_ERRORS or status in TRANSIENT or status >= 500:
            return True
        error = error.__cause__ or error.__context__
    return False


def _raise_cache_error(error: Exception) -> None:
    """Raise ``OSError`` that says how to move the cache, if the disk or its permissions failed.

    Raises the ``StorageError`` of a remote file.
    """
    cause = error if isinstance(error, OSError) else error.__cause__
    if isinstance(cause, StorageError):
        raise cause
    if isinstance(cause, OSError) and cause.errno is not None:
        text = f"the cache {datasets.config.HF_DATASETS_CACHE} cannot be used"
        move = "the environment variable HF_HOME moves it"
        raise OSError(f"data: {text}: {cause}; {move}") from error
