"""Data sources: the documents of each row, in the same order on any number of ranks.

A global batch has a fixed number of rows. Row ``r`` of ``n`` reads documents r, r + n, r + 2n, ...
of an endless shuffled order, so a step's data depend only on the seed and the step. Of streamed
datasets each row reads files of its own (``data/hub.py``).
"""

import hashlib
from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache, partial
from itertools import product
from typing import Any, NamedTuple, Protocol

import numpy as np

from config.job_config import Data, DataSource, DocumentSource
from config.resume_compat import shown
from data.files import FINGERPRINT_SAMPLES, evenly_spaced, order_fingerprints
from data.formats import Format, format_of
from data.markers import FORMER_BOS_NAMES, FORMER_EOS_NAMES
from data.matching import FileId, file_id, file_status, identity, matching_files, without_owned
from data.outside import OutsideDocuments
from data.remote_errors import mistakes_as_value_errors
from data.storage import DataPath, for_each
from data.text_files import TextFiles, builtin_files
from data.token_files import TokenFiles, open_token_files
from data.tokenizer import Tokenizer, load_tokenizer
from runtime.log import logger

# Documents of as many row groups as have these are shuffled together, so that few are decoded.
SHUFFLED_DOCUMENTS = 8192
# Each pass draws all sort keys and sorts a part of them, so that they are never all in memory.
SORT_PASSES, DRAWN_AT_ONCE = 8, 1 << 18
# Bytes of epochs' orders that a source keeps, and those that an order takes besides its indices.
CACHED_ORDERS, ORDER_OVERHEAD = 64 << 20, 512

Document = str | np.ndarray | None
"""Text, or its token ids (s,) with bos and eos; None if it cannot be read."""
# Labels of sources by the files that are theirs.
Owners = dict[FileId, str]
# Owners of the columns of tables; those of text and of token ids own the column WHOLE_FILE.
ColumnOwners = defaultdict[str, Owners]
WHOLE_FILE = ""
READ_WHOLE = 'a dataset is read whole: type = "files" reads the files of a local copy'


class Reserved(NamedTuple):
    """Files of validation by identity, with the names of their sources: not to be trained on."""

    files: Owners
    excluded: Owners
    """Those that training omits; its patterns must not match the others."""


class Source(Protocol):
    """Documents, of which each row of the global batch reads its own share in a fixed order."""

    fingerprint: str
    """Equal for sources with the same documents in the same order."""
    resumable_fingerprints: frozenset[str]
    """Fingerprints of the sources whose rows this one can go on with: repeating or not."""
    description: str

    def documents(self, row: int, n_rows: int, start: int) -> Iterator[Document]:
        """Iterate over the row's documents from its ``start``-th; endless if the source repeats."""
        ...

    def changed_since(self, seconds: float) -> list[DataPath]:
        """Files whose contents or names changed after this time since the epoch."""
        ...

    def place(self, row: int, n_rows: int, number: int) -> str:
        """File of the row's ``number``-th document, and its index there; "" if unknown."""
        ...

    @property
    def n_documents(self) -> int | None:
        """Number of documents in one epoch, over all rows; None if unknown."""
        ...


class Documents(Protocol):
    """Documents by index, in their order on disk; ``ValueError`` if one cannot be read."""

    @property
    def paths(self) -> Sequence[DataPath]:
        """Files that hold the documents."""
        ...

    @property
    def groups(self) -> np.ndarray | None:
        """Ascending number of each document's group (n,), read at once; None: each is alone."""
        ...

    @property
    def split_hashes(self) -> np.ndarray:
        """Uniform uint64 per document that decides whether it is held out."""
        ...

    def place(self, index: int) -> str:
        """File of a document, and its index there."""
        ...

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Document: ...


class SkipBadRecords:
    """Returns None in place of documents that cannot be read, and logs them."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents

    @property
    def paths(self) -> Sequence[DataPath]:
        return self._documents.paths

    @property
    def groups(self) -> np.ndarray | None:
        return self._documents.groups

    @property
    def split_hashes(self) -> np.ndarray:
        return self._documents.split_hashes

    def place(self, index: int) -> str:
        return self._documents.place(index)

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> Document:
        try:
            return self._documents[index]
        except ValueError as error:
            logger.warning("data: skipped bad record: %s", error)
            return None


class ShuffledDocuments:
    """Source that reads documents in another seeded order each epoch.

    Documents in groups are shuffled within ``SHUFFLED_DOCUMENTS`` of groups in a seeded order.
    """

    def __init__(
        self,
        documents: Documents,
        indices: np.ndarray | None,
        *,
        seed: int,
        name: str,
        fingerprint: str,
        repeat: bool = True,
        groups: np.ndarray | None = None,
        paths: Sequence[DataPath] = (),
        place: Callable[[int], str] = lambda index: "",
    ) -> None:
        """``indices``: of the documents to read; None: all. Others: as in ``Documents``."""
        if len(documents) == 0:
            raise ValueError("data.path: no documents")
        n_documents = len(documents) if indices is None else len(indices)
        if n_documents == 0:
            raise ValueError(
                f"data: none of the {len(documents):,} documents is left for {name};"
                " see data.validation_percent"
            )
        self._documents, self._seed, self._paths, self._place = documents, seed, paths, place
        self._repeat, self.n_documents = repeat, n_documents
        # An epoch's order is the memory that grows with the number of documents, on every rank.
        self._dtype = np.dtype(np.uint32 if len(documents) <= 2**32 else np.int64)
        self._indices = None if indices is None else indices.astype(self._dtype)
        self._group_ends = None
        if groups is not None:
            self._group_ends = _run_ends(groups if indices is None else groups[indices])
        order = f"{fingerprint}/{name}/{seed}/{n_documents}"
        self.fingerprint, self.resumable_fingerprints = order_fingerprints(order, repeat=repeat)
        self.description = f"{n_documents:,} documents for {name}"
        # Rows with short documents run ahead: by many epochs if an epoch has few documents per
        # row, by less than one if it has many.
        n_bytes = n_documents * self._dtype.itemsize + ORDER_OVERHEAD
        self._order = lru_cache(maxsize=max(2, CACHED_ORDERS // n_bytes))(self._permutation)

    def documents(self, row: int, n_rows: int, start: int) -> Iterator[Document]:
        counter = start * n_rows + row
        while self._repeat or counter < self.n_documents:
            yield self._documents[self._index(counter)]
            counter += n_rows

    def place(self, row: int, n_rows: int, number: int) -> str:
        return self._place(self._index(number * n_rows + row))

    def changed_since(self, seconds: float) -> list[DataPath]:
        # Not the time of modification, which copies keep and programs set.
        return [path for path in self._paths if path.stat().st_ctime > seconds]

    def _index(self, counter: int) -> int:
        epoch, position = divmod(counter, self.n_documents)
        return int(self._order(epoch)[position])

    def _permutation(self, epoch: int) -> np.ndarray:
        # NumPy guarantees the same raw random numbers in every release, but not permutations.
        draw = partial(np.random.Philox, key=[self._seed, epoch])
        parts = (
            (_sorted_part(draw(), self.n_documents, i, self._dtype) for i in range(SORT_PASSES))
            if self._group_ends is None
            else _in_blocks(draw(), self._group_ends)
        )
        order, filled = np.empty(self.n_documents, self._dtype), 0
        for part in parts:
            indices = part if self._indices is None else self._indices[part]
            order[filled : filled + len(part)] = indices
            filled += len(part)
        return order


def _run_ends(values: np.ndarray) -> np.ndarray:
    """Return the end of each run of equal ``values`` (n,)."""
    return np.append(np.flatnonzero(values[1:] != values[:-1]) + 1, len(values))


def _sorted_part(generator: np.random.Philox, n: int, number: int, dtype: np.dtype) -> np.ndarray:
    """Return the ``number``-th of ``SORT_PASSES`` parts of the stable argsort of ``n`` draws."""
    parts = []
    for start in range(0, n, DRAWN_AT_ONCE):
        keys = generator.random_raw(min(DRAWN_AT_ONCE, n - start))
        own = np.flatnonzero(keys // (2**64 // SORT_PASSES) == number)
        parts.append((keys[own], (own + start).astype(dtype)))
    own_keys, positions = map(np.concatenate, zip(*parts, strict=True))
    del parts
    return positions[np.argsort(own_keys, kind="stable")]


def _in_blocks(generator: np.random.Philox, ends: np.ndarray) -> Iterator[np.ndarray]:
    """Iterate over blocks of whole groups, whose positions end at ``ends``, each shuffled."""
    keys = generator.random_raw(ends[-1])
    sizes = np.diff(ends, prepend=0)
    groups = np.argsort(generator.random_raw(len(ends)), kind="stable")
    block_ends = _run_ends(np.cumsum(sizes[groups]) // SHUFFLED_DOCUMENTS)
    for block in np.split(groups, block_ends[:-1]):
        ascending = np.sort(block)
        counts = sizes[ascending]
        positions = np.repeat(ends[ascending] - np.cumsum(counts), counts)
        positions += np.arange(len(positions))
        yield positions[np.argsort(keys[positions], kind="stable")]


def build_sources(
    config: Data,
    seed: int,
    *,
    with_held_out: bool = True,
    tokenizer: Tokenizer | None = None,
    reserved: Reserved | None = None,
) -> tuple[list[Source], dict[str, Source]]:
    """Build the training sources, and the held-out ones by the source's label.

    Sources of token ids must match ``tokenizer``, if it is given. A hash of each file's relative
    path (and table row) decides whether it is held out, so the split is the same on every machine.
    ``reserved``: files that must not be trained on.
    Raises ``ValueError`` for missing or bad data, ``OSError`` if reading fails.
    """
    train, held_out = [], {}
    reserved = reserved or Reserved({}, {})
    owners = _first_owners(reserved)
    percent, skips_bad = config.validation_percent, config.on_bad_record == "skip"
    check_tokens = partial(check_tokenizer, tokenizer=tokenizer, config=config)
    for source in config.mixture:
        label = f"data.sources, {source.label}"
        with named_errors(label) if config.sources else nullcontext():
            train_source, held_out_source = _build_source(
                source,
                percent,
                seed,
                owners,
                with_held_out=with_held_out,
                skips_bad=skips_bad,
                reserved=reserved,
                check_tokens=check_tokens,
            )
        train.append(train_source)
        if held_out_source is not None:
            held_out[source.label] = held_out_source
    return train, held_out


def check_tokenizer(files: TokenFiles, tokenizer: Tokenizer | None, config: Data) -> None:
    """Raise ``ValueError`` if the metadata of ``files`` do not match ``tokenizer``, if given."""
    if tokenizer is None:
        return
    name, saved = config.tokenizer, files.tokenizer
    if saved is not None and files.tokenizer_fingerprint != tokenizer.fingerprint:
        text = f"another tokenizer than data.tokenizer {name}"
        if (markers := _other_markers(saved, name)) is not None:
            here, there = _markers_text(config.bos, config.eos), _markers_text(*markers)
            text += f" with {here}: set {there}"
        elif saved.get("name", name) != name:
            text += f", by {saved['name']!r}"
        raise ValueError(f"data.path: tokenized with {text}")
    if files.max_id is not None and files.max_id >= tokenizer.n_vocab:
        text = f"token id {files.max_id} exceeds data.tokenizer {name} of size {tokenizer.n_vocab}"
        raise ValueError(f"data.path: {text}")


def _markers_text(bos: str | None, eos: str | None) -> str:
    return f"data.bos = {shown(bos)} and data.eos = {shown(eos)}"


def _other_markers(saved: Mapping[str, Any], name: str) -> tuple[str | None, str | None] | None:
    """(data.bos, data.eos) that make ``name`` the tokenizer ``saved``; None if it is another."""
    markers = [(saved.get("bos"), saved.get("eos"))]
    if "bos" not in saved:
        # From before they were keys.
        markers = [*product(FORMER_BOS_NAMES, FORMER_EOS_NAMES)]
    for bos, eos in markers:
        with suppress(TypeError, ValueError):
            if load_tokenizer(name, bos=bos, eos=eos).fingerprint == saved["fingerprint"]:
                return bos, eos
    return None


@contextmanager
def named_errors(source: str) -> Iterator[None]:
    """Prefix errors with the name of the source."""
    try:
        yield
    except (ValueError, OSError) as error:
        kind = ValueError if isinstance(error, ValueError) else OSError
        raise kind(f"{source}: {str(error).removeprefix('data.')}") from None


def _build_source(
    config: DataSource,
    percent: float,
    seed: int,
    owners: ColumnOwners,
    *,
    with_held_out: bool,
    skips_bad: bool,
    reserved: Reserved,
    check_tokens: Callable[[TokenFiles], None],
) -> tuple[Source, Source | None]:
    if config.is_on_hub:
        # Imported here, because datasets takes a second to import.
        from data.hub import hub_streams

        streams = hub_streams(config, with_held_out, percent, skips_bad=skips_bad)
        stream = streams[0]
        _check_no_owner(stream.paths, reserved.files, READ_WHOLE)
        taken = ChainMap(owners[WHOLE_FILE], owners[config.text_key])
        paths = [*stream.paths, *stream.held_out_paths]
        _check_no_owner(paths, taken, READ_WHOLE)
        owners[config.text_key].update((file_id(path), config.label) for path in paths)
        return streams
    documents, fingerprint = open_documents(
        config, owners, reserved=reserved, skips_bad=skips_bad, check_tokens=check_tokens
    )
    build = partial(
        ShuffledDocuments,
        documents,
        seed=seed,
        fingerprint=fingerprint,
        groups=documents.groups,
        paths=documents.paths,
        place=documents.place,
    )
    if percent == 0:
        return build(None, name="training", repeat=config.repeat), None
    if with_held_out and len(documents) == 1:
        text = "the only document cannot be both trained on and held out: train without validation"
        raise ValueError(f"data: {text}, data.validation_percent = 0 and validation.enable = false")
    is_held_out = _is_held_out(documents, percent)
    train = build(np.flatnonzero(~is_held_out), name="training", repeat=config.repeat)
    if not with_held_out:
        return train, None
    return train, build(np.flatnonzero(is_held_out), name="validation", repeat=False)


def _is_held_out(documents: Documents, percent: float) -> np.ndarray:
    hashes = documents.split_hashes
    is_held_out = hashes < np.uint64(percent / 100 * 2**64)
    if len(hashes) > 1 and not is_held_out.any():
        # Hold out at least one document, however few there are.
        return hashes == hashes.min()
    return is_held_out


@mistakes_as_value_errors()
def open_documents(
    config: DocumentSource,
    owners: ColumnOwners | None = None,
    *,
    reserved: Reserved | None = None,
    skips_bad: bool = False,
    check_tokens: Callable[[TokenFiles], None] | None = None,
) -> tuple[Documents, str]:
    """Open a source's documents by index; return them and their fingerprint.

    ``owners``: files of other sources, which are omitted; gets those of this one. Absent: those
    that ``reserved`` excludes. ``skips_bad``: documents that cannot be read are None. Raises
    ``ValueError`` for missing files, and for others that are ``reserved``.
    """
    reserved = reserved or Reserved({}, {})
    owners = _first_owners(reserved) if owners is None else owners
    documents, fingerprint = _open_documents(config, owners, skips_bad, check_tokens)
    hint = READ_WHOLE if config.is_on_hub else "see its key exclude_from_training"
    _check_no_owner(documents.paths, reserved.files, hint)
    return documents, fingerprint


def _check_no_owner(paths: Sequence[DataPath], owners: Mapping[FileId, str], hint: str) -> None:
    """Raise ``ValueError`` for a path that another source has."""
    for path in paths if owners else ():
        if owner := owners.get(file_id(path)):
            raise ValueError(f"data.path: {path} is also a file of {owner}; {hint}")


def _first_owners(reserved: Reserved) -> ColumnOwners:
    return defaultdict(dict, {WHOLE_FILE: dict(reserved.excluded)})


def _open_documents(
    config: DocumentSource,
    owners: ColumnOwners,
    skips_bad: bool,
    check_tokens: Callable[[TokenFiles], None] | None,
) -> tuple[Documents, str]:
    if config.type == "tokens":
        tokenized = open_token_files(config.path, ChainMap(*owners.values()), config.label)
        owners[WHOLE_FILE].update((file_id(path), config.label) for path in tokenized.paths)
        if check_tokens is not None:
            check_tokens(tokenized)
        return SkipBadRecords(tokenized) if skips_bad else tokenized, tokenized.fingerprint
    if config.is_outside:
        outside = OutsideDocuments(config, skips_bad=skips_bad)
        return outside, outside.fingerprint
    if config.is_on_hub:
        from data.hub import HubTable

        table = HubTable(config, skips_bad=skips_bad)
        fingerprint = _fingerprint(table.identity, table)
        return SkipBadRecords(table) if skips_bad else table, fingerprint
    is_builtin = config.type == "builtin"
    # A table may have several columns of text.
    taken = ChainMap(owners[WHOLE_FILE], owners[config.text_key])
    files = builtin_files() if is_builtin else matching_files(config.path, taken, config.label)
    found = [] if is_builtin else _with_formats(files, as_text=config.type == "text")
    tables = [(path, name, form) for path, name, form in found if form not in ("text", None)]
    if not tables:
        files = without_owned(files, ChainMap(*owners.values()), config.label)
    column = config.text_key if tables else WHOLE_FILE
    # Once: there may be many files, on a file system that is slow to answer.
    statuses = {path: file_status(path) for path, _ in files}
    owners[column].update(
        (identity(path, status), config.label) for path, status in statuses.items()
    )
    sizes = {path: status.st_size for path, status in statuses.items()}
    listing = "\n".join(f"{name} {sizes[path]}" for path, name in files)
    documents: Documents
    if not tables:
        empty = {path for path, _, form in found if form is None}
        texts = [file for file in files if file[0] not in empty]
        errors = "replace" if is_builtin else "strict"
        documents = TextFiles(texts, sizes, encoding_errors=errors)
        documents = SkipBadRecords(documents) if skips_bad else documents
        return documents, _fingerprint(listing, documents)
    _check_all_are_tables(found)
    # Imported here, because pyarrow takes a moment to import.
    from data.tables import Tables

    rows = Tables(tables, config.text_key, skips_bad=skips_bad)
    documents = SkipBadRecords(rows) if skips_bad else rows
    return documents, _fingerprint(listing + rows.footers, documents, rows.samples())


def _with_formats(
    files: list[tuple[DataPath, str]], *, as_text: bool
) -> list[tuple[DataPath, str, Format | None]]:
    paths = [path for path, _ in files]
    formats = for_each(partial(format_of, as_text=as_text), paths, of=paths[0])
    return [(*file, found) for file, found in zip(files, formats, strict=True)]


def _check_all_are_tables(found: list[tuple[DataPath, str, Format | None]]) -> None:
    texts = [str(path) for path, _, file_format in found if file_format == "text"]
    if texts:
        more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
        text = f"data.path: mixes tables with plain text files: {', '.join(texts[:3])}{more}"
        raise ValueError(f"{text}; use two [[data.sources]]")


def _fingerprint(listing: str, documents: Documents, indices: Iterable[int] | None = None) -> str:
    """Hash of ``listing``, which names the files, and of documents: evenly spaced, or these."""
    digest = hashlib.sha256(listing.encode())
    if indices is None:
        indices = evenly_spaced(len(documents), FINGERPRINT_SAMPLES)
    for index in indices:
        document = documents[index]
        if isinstance(document, np.ndarray):
            digest.update(document.tobytes())
        elif document is not None:
            digest.update(document.encode())
    return digest.hexdigest()
