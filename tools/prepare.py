"""Tokenize a run's documents once, into a folder that runs read with ``data.source = "tokens"``.

``python -m tools.prepare FOLDER [--config run.toml] [--data.path 'x/*.jsonl' ...] [--workers N]``
``python -m tools.prepare FOLDER --verify``: hash all files of a folder.

The documents and the tokenizer are those of [data], as a run would read them. Stopped, even by
SIGKILL, the same command goes on where it was; the bytes are the same for any number of workers.
"""

import argparse
import fcntl
import hashlib
import json
import os
import re
import shlex
import signal
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection as connections
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from checkpoint.manifest import sync_folder
from config import load_config
from config.job_config import Data, DataSource
from data.sources import Document, Documents, open_documents
from data.token_files import (
    BEGUN_FILE,
    DTYPES,
    ENDS_DTYPE,
    FORMAT,
    INDEX_FILE,
    check_sizes,
    dtype_of,
    index_text,
    read_index,
    verify,
)
from data.tokenizer import Tokenizer, load_tokenizer
from runtime import exit_codes
from runtime.compat import usable_cpus

CONFIG_FILE = Path(__file__).parents[1] / "train_configs" / "debug_model.toml"
SHARD_TOKENS = 1 << 26
# From so many documents, spread over all, follows how many make a shard.
MEASURED = 64
# Tokens that a worker writes, and tells of, at once.
BLOCK_TOKENS = 1 << 17
PATIENCE_SECONDS = 5.0
SUFFIXES = ("bin", "ends", "json")
OURS = re.compile(r"(begun\.json|index\.json|shard-\d{5,}\.(bin|ends|json))(\.[0-9a-f]{32}\.tmp)?")


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


class WorkerLost(Exception):
    """A worker ended without a word."""


class Told(NamedTuple):
    """What a worker says of its shard, again and again."""

    documents: int = 0
    tokens: int = 0
    is_done: bool = False
    error: str = ""


def main(arguments: list[str]) -> int:
    try:
        options, overrides = parse(arguments)
        if options.verify:
            return verify_folder(options.folder)
        data = load_config(options.config or CONFIG_FILE, overrides).data
        n_workers = options.workers or usable_cpus()
        prepare(options.folder, data, n_workers=n_workers, shard_tokens=options.shard_tokens)
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return exit_codes.PREEMPTED
    except WorkerLost as error:
        print(f"{error}; the same command goes on", file=sys.stderr)
        return exit_codes.FAILED
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return exit_codes.BAD_CONFIG
    return exit_codes.DONE


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The tool's own options, and the overrides of the run's keys."""
    own, overrides, rest = [], [], list(arguments)
    while rest:
        argument = rest.pop(0)
        key, is_given, _ = argument.partition("=")
        if not re.match(r"--[^.]+\.", key):
            own.append(argument)
            continue
        if not key.startswith("--data."):
            raise ValueError(f"command line: {key} does nothing here; --data.KEY does")
        overrides.append(argument)
        if not is_given and rest and not rest[0].startswith("--"):
            overrides.append(rest.pop(0))
    parser = Parser(prog="python -m tools.prepare", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("folder", metavar="FOLDER", type=Path, help="what is written, or gone on with")
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help="a run's; default train_configs/debug_model.toml",
    )
    add("--workers", type=_count, metavar="N", help="processes; default: the CPUs there are")
    add(
        "--shard_tokens",
        type=_count,
        metavar="N",
        help=f"of a shard, about; default {SHARD_TOKENS}",
    )
    add("--verify", action="store_true", help="only hash the files that are there")
    options = parser.parse_args(own)
    if options.verify and (overrides or len(own) > 2):
        raise ValueError("argument --verify: takes FOLDER and nothing else")
    options.shard_tokens = options.shard_tokens or SHARD_TOKENS
    return options, overrides


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 0 < int(text[:20]) < 10**18:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 1 or more")
    return int(text)


def verify_folder(folder: Path) -> int:
    n_files, n_wrong = 0, 0
    for path, problem in verify(folder):
        n_files += 1
        if problem:
            n_wrong += 1
            print(f"{path}: {problem}", file=sys.stderr)
    print(f"{folder}: {n_files - n_wrong} of {n_files} files are what was written")
    return exit_codes.BAD_CONFIG if n_wrong else exit_codes.DONE


def prepare(folder: Path, data: Data, *, n_workers: int, shard_tokens: int) -> None:
    """Fill ``folder`` with what is missing there; print how a run reads it.

    Raises ``ValueError`` for what cannot be read, and if the folder was begun with something else.
    """
    if len(data.mixture) != 1:
        raise ValueError("data.sources: each source of a mixture is prepared by itself")
    source = data.mixture[0]
    if source.type not in ("builtin", "files"):
        raise ValueError(f"data.source: {source.type} has no known order; only builtin, files do")
    if data.on_bad_record == "skip":
        raise ValueError("data.on_bad_record: skip: not implemented here; a bad document is named")
    facts = _facts(source, data.tokenizer, shard_tokens)
    with _locked(folder):
        begun = _begin(folder, facts)
        n_shards = -(-begun["source"]["documents"] // begun["documents_per_shard"])
        if not (folder / INDEX_FILE).exists():
            shards = _finished_shards(folder, begun)
            missing = [number for number in range(n_shards) if number not in shards]
            progress = Progress(begun["source"]["documents"], list(shards.values()))
            tokenize(folder, source, begun, numbers=missing, n_workers=n_workers, progress=progress)
            _publish_index(folder, begun, n_shards)
        index = read_index(folder)
        for shard in index["shards"]:
            check_sizes(folder, shard, DTYPES[index["dtype"]])
        # What led here is in the index now.
        _remove(
            folder,
            {path.name for path in folder.iterdir() if path.suffix != ".json"} | {INDEX_FILE},
        )
    print(
        f"{folder}: {index['documents']:,} documents ({index['skipped']:,} empty ones left out),"
        f" {index['tokens']:,} tokens of {index['dtype']}, {n_shards} shards"
    )
    keys = {"source": "tokens", "path": str(folder), "tokenizer": index["tokenizer"]["name"]}
    told = " ".join(f"--data.{key} {shlex.quote(value)}" for key, value in keys.items())
    print(f"next: ./run_train.sh {told}")


def _facts(source: DataSource, tokenizer_name: str, shard_tokens: int) -> dict[str, Any]:
    """All that the bytes of the folder depend on."""
    documents, fingerprint = open_documents(source)
    tokenizer = load_tokenizer(tokenizer_name)
    if len(documents) == 0:
        raise ValueError("data.path: there is no document")
    measured = range(0, len(documents), len(documents) // MEASURED + 1)
    tokens = sum(len(_encode(tokenizer, documents[index])) for index in measured)
    return {
        "format": FORMAT,
        "dtype": dtype_of(tokenizer.n_vocab),
        "tokenizer": {
            "name": tokenizer_name,
            "fingerprint": tokenizer.fingerprint,
            "n_vocab": tokenizer.n_vocab,
            "bos_id": tokenizer.bos_id,
            "eos_id": tokenizer.eos_id,
        },
        "source": {
            "name": f"{source.type} {source.path}".strip(),
            "fingerprint": fingerprint,
            "documents": len(documents),
        },
        "shard_tokens": shard_tokens,
        "documents_per_shard": max(1, shard_tokens * len(measured) // max(1, tokens)),
    }


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder, which is made if there is none; ``ValueError`` if another process holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder}: another process is preparing it now") from None
        yield
    finally:
        os.close(descriptor)


def _begin(folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """The facts that the folder was begun with, which are written if it is new."""
    foreign = sorted(path.name for path in folder.iterdir() if not OURS.fullmatch(path.name))
    if foreign:
        raise ValueError(f"{folder}: {foreign[0]} is not of a prepared folder; name a new one")
    if (folder / INDEX_FILE).exists():
        begun = read_index(folder)
    elif (folder / BEGUN_FILE).exists():
        begun = _read_json(folder / BEGUN_FILE)
        if begun.get("format") != FORMAT:
            raise ValueError(f"{folder / BEGUN_FILE}: its format is not {FORMAT}")
    else:
        _write(folder / BEGUN_FILE, json.dumps(facts, indent=1).encode())
        return facts
    then, now = ([f["source"], f["tokenizer"], f["shard_tokens"]] for f in (begun, facts))
    changes = []
    for what, old, new in zip(("documents", "tokenizer"), then, now, strict=False):
        if old["fingerprint"] != new["fingerprint"]:
            is_same = old["name"] == new["name"]
            names = f"{old['name']} has changed" if is_same else f"{old['name']}, not {new['name']}"
            changes.append(f"{what}: {names}")
    if then[2] != now[2]:
        changes.append(f"--shard_tokens: {then[2]}, not {now[2]}")
    if changes:
        raise ValueError(f"{folder} was begun with something else: {'; '.join(changes)}")
    return begun


def _finished_shards(folder: Path, begun: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """By number, the facts of the shards that are whole; what else there is of shards goes."""
    finished = {}
    for path in folder.glob("shard-*.json"):
        # Its facts are the last of a shard that is written, so the rest was.
        with suppress(ValueError, KeyError):
            shard = _read_json(path)
            check_sizes(folder, shard, DTYPES[begun["dtype"]])
            finished[int(path.stem.removeprefix("shard-"))] = shard
    keep = {f"{_name(number)}.{suffix}" for number in finished for suffix in SUFFIXES}
    _remove(folder, keep | {BEGUN_FILE})
    return finished


def _remove(folder: Path, keep: set[str]) -> None:
    for path in folder.iterdir():
        if OURS.fullmatch(path.name) and path.name not in keep:
            path.unlink()


def _publish_index(folder: Path, begun: dict[str, Any], n_shards: int) -> None:
    shards = [_read_json(folder / f"{_name(number)}.json") for number in range(n_shards)]
    counts = {k: sum(shard[k] for shard in shards) for k in ("documents", "tokens", "skipped")}
    if counts["documents"] == 0:
        raise ValueError(f"data.path: none of {counts['skipped']:,} documents has text")
    _write(folder / INDEX_FILE, index_text({**begun, **counts, "shards": shards}))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _write(path: Path, content: bytes) -> None:
    file = NewFile(path)
    file.write(content)
    file.publish()
    sync_folder(path.parent)


def _name(number: int) -> str:
    return f"shard-{number:05d}"


def tokenize(
    folder: Path,
    source: DataSource,
    begun: dict[str, Any],
    *,
    numbers: list[int],
    n_workers: int,
    progress: "Progress",
) -> None:
    """Write the shards ``numbers`` in other processes.

    Raises ``ValueError`` that a worker met, ``WorkerLost`` if one died.
    """
    waiting = deque(numbers)
    busy: dict[Connection, int] = {}
    with _workers(min(n_workers, len(numbers)), folder, source, begun) as idle:
        while waiting or busy:
            while waiting and idle:
                connection = idle.pop()
                busy[connection] = waiting.popleft()
                with suppress(BrokenPipeError):  # its end is seen below
                    connection.send(busy[connection])
            ready = connections.wait(list(busy), timeout=0.5)
            for connection in [connection for connection in busy if connection in ready]:
                told = _receive(connection)
                progress.add(busy[connection], told)
                if told.is_done:
                    del busy[connection]
                    idle.append(connection)
            progress.show()
    progress.show(is_last=True)


def _receive(connection: Connection) -> Told:
    try:
        told: Told = connection.recv()
    except (EOFError, ConnectionResetError):
        raise WorkerLost("a worker died; if memory was short, take fewer --workers") from None
    if told.error:
        raise ValueError(told.error)
    return told


@contextmanager
def _workers(
    count: int, folder: Path, source: DataSource, begun: dict[str, Any]
) -> Iterator[list[Connection]]:
    """Processes that take numbers of shards; they are gone in the end, with what is half done."""
    context = get_context("forkserver")
    # They are forked from a process that has loaded torch, and share its memory.
    context.set_forkserver_preload(["checkpoint.manifest", "data.sources", "data.tokenizer"])
    processes, ours = [], []
    # Of Ctrl-C, which all processes of a terminal get, only this one is to know.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for _ in range(count):
            connection, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, folder, source, begun))
            process.start()
            theirs.close()
            processes.append(process)
            ours.append(connection)
        signal.signal(signal.SIGINT, handler)
        yield [*ours]
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for connection in ours:
            connection.close()
        # They end by themselves when nobody listens, and leave no semaphore behind.
        deadline = time.monotonic() + PATIENCE_SECONDS
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
        for path in folder.glob("*.tmp"):
            path.unlink()
        signal.signal(signal.SIGINT, handler)


def _work(connection: Connection, folder: Path, source: DataSource, begun: dict[str, Any]) -> None:
    """Write shards until there are no more, or nobody listens: then the parent was killed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            documents, fingerprint = open_documents(source)
            tokenizer = load_tokenizer(begun["tokenizer"]["name"])
            if fingerprint != begun["source"]["fingerprint"]:
                raise ValueError(f"data.path: {source.path} changed while it was read")
            while True:
                write_shard(folder, connection.recv(), documents, tokenizer, begun, connection.send)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except OSError as error:
            where = error.filename or folder
            text = f"{where}: {error.strerror or error}; what is finished stays"
            connection.send(Told(error=text))
        except ValueError as error:
            connection.send(Told(error=str(error)))


def write_shard(
    folder: Path,
    number: int,
    documents: Documents,
    tokenizer: Tokenizer,
    begun: dict[str, Any],
    tell: Callable[[Told], None],
) -> None:
    """Tokenize one range of documents. The file of its facts, written last, makes it count."""
    ids_file = NewFile(folder / f"{_name(number)}.bin")
    ends_file = NewFile(folder / f"{_name(number)}.ends")
    first = number * begun["documents_per_shard"]
    end = min(first + begun["documents_per_shard"], begun["source"]["documents"])
    low, high, n_documents, n_tokens = [], [], 0, 0
    for block, n_read in _blocks(documents, tokenizer, range(first, end)):
        ids = np.concatenate(block)
        low.append(int(ids.min()))
        high.append(int(ids.max()))
        assert 0 <= low[-1] <= high[-1] < tokenizer.n_vocab, "ids below n_vocab"
        ids_file.write(ids.astype(DTYPES[begun["dtype"]]).tobytes())
        ends = n_tokens + np.cumsum([len(document) for document in block])
        ends_file.write(ends.astype(ENDS_DTYPE).tobytes())
        n_documents, n_tokens = n_documents + len(block), int(ends[-1])
        tell(Told(n_read, n_tokens))
    sha256, ends_sha256 = ids_file.publish(), ends_file.publish()
    sync_folder(folder)
    shard = {
        "file": f"{_name(number)}.bin",
        "documents": n_documents,
        "skipped": end - first - n_documents,
        "tokens": n_tokens,
        "min_id": min(low, default=None),
        "max_id": max(high, default=None),
        "sha256": sha256,
        "ends_sha256": ends_sha256,
    }
    _write(folder / f"{_name(number)}.json", json.dumps(shard).encode())
    tell(Told(end - first, n_tokens, is_done=True))


def _blocks(
    documents: Documents, tokenizer: Tokenizer, indices: range
) -> Iterator[tuple[list[np.ndarray], int]]:
    """Tokenized documents, some at once, and how many were read until then; none is empty."""
    block: list[np.ndarray] = []
    n_tokens = 0
    for n_read, index in enumerate(indices, start=1):
        ids = _encode(tokenizer, documents[index])
        if len(ids) > 0:
            block.append(ids)
            n_tokens += len(ids)
        if n_tokens >= BLOCK_TOKENS:
            yield block, n_read
            block, n_tokens = [], 0
    if block:
        yield block, len(indices)


def _encode(tokenizer: Tokenizer, text: Document) -> np.ndarray:
    """The ids that a run trains on; none of an empty document, which a run passes over."""
    assert isinstance(text, str), "text"
    if not text:
        return np.empty(0, np.int64)
    ids = tokenizer.encode(text)
    whole = np.empty(len(ids) + 2, np.int64)
    whole[0], whole[1:-1], whole[-1] = tokenizer.bos_id, ids, tokenizer.eos_id
    return whole


class NewFile:
    """A file that has its name only once it is whole, and knows its hash."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Nobody else's, should a worker outlive its parent for a moment.
        self._scratch = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
        self._file = self._scratch.open("xb")
        self._digest = hashlib.sha256()

    def write(self, content: bytes) -> None:
        self._digest.update(content)
        self._file.write(content)

    def publish(self) -> str:
        """Make it survive a power cut, but for its name; return the hash."""
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        self._scratch.rename(self._path)
        return self._digest.hexdigest()


class Progress:
    """A line on stderr: redrawn on a terminal, else once a minute."""

    def __init__(self, n_documents: int, shards: list[dict[str, Any]]) -> None:
        self._n_documents = n_documents
        self._before = sum(shard["documents"] + shard["skipped"] for shard in shards)
        self._told: dict[int, Told] = {}
        self._is_terminal = sys.stderr.isatty()
        self._begin = self._shown = time.monotonic()

    def add(self, number: int, told: Told) -> None:
        self._told[number] = told

    def show(self, *, is_last: bool = False) -> None:
        now = time.monotonic()
        if not is_last and now - self._shown < (0.5 if self._is_terminal else 60.0):
            return
        self._shown, seconds = now, max(now - self._begin, 1e-9)
        read = sum(told.documents for told in self._told.values())
        tokens = sum(told.tokens for told in self._told.values())
        left = (self._n_documents - self._before - read) * seconds / max(read, 1)
        line = (
            f"{self._before + read:,} of {self._n_documents:,} documents, {tokens:,} tokens,"
            f" {tokens / seconds:,.0f} tokens/s, {left:,.0f} s left"
        )
        start, end = ("\r\x1b[K", "\n" if is_last else "") if self._is_terminal else ("", "\n")
        print(f"{start}{line}", end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    # A scheduler's way to say Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
