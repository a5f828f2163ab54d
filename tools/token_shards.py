"""Turn documents into shards of ids, in worker processes."""

import hashlib
import json
import os
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
from typing import Any, NamedTuple

import numpy as np

from checkpoint.manifest import sync_folder
from config.job_config import DataSource
from data.sources import Documents, open_documents
from data.token_files import (
    DTYPES,
    ENDS_DTYPE,
)
from data.tokenizer import Tokenizer, load_tokenizer

# Tokens that a worker writes at once, and then reports.
BLOCK_TOKENS = 1 << 17
PATIENCE_SECONDS = 5.0


class WorkerLost(Exception):
    """A worker ended without a word."""


class Told(NamedTuple):
    """What a worker reports about its shard, again and again."""

    documents: int = 0
    tokens: int = 0
    is_done: bool = False
    error: str = ""


class Progress:
    """A line on stderr: redrawn on a terminal, else once a minute."""

    def __init__(self, n_documents: int, shards: list[dict[str, Any]]) -> None:
        self._n_documents = n_documents
        self._before = sum(s["documents"] + s["skipped"] + s["bad"] for s in shards)
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


def tokenize(
    folder: Path,
    source: DataSource,
    begun: dict[str, Any],
    *,
    numbers: list[int],
    n_workers: int,
    progress: Progress,
) -> None:
    """Write the shards ``numbers`` in other processes.

    Raises a worker's error as ``ValueError``, and ``WorkerLost`` if one died.
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
    """Processes that take numbers of shards; at the end they are gone, and unfinished files too."""
    context = get_context("forkserver")
    # They are forked from a process that has loaded torch, and share its memory.
    context.set_forkserver_preload(["checkpoint.manifest", "data.sources", "data.tokenizer"])
    processes, ours = [], []
    # All processes of a terminal get Ctrl-C, but only this one is to act on it.
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
            documents, fingerprint = open_documents(source, skips_bad=begun["skips_bad"])
            tokenizer = load_tokenizer(begun["tokenizer"]["name"])
            if fingerprint != begun["source"]["fingerprint"]:
                raise ValueError(f"data.path: {source.path} changed while it was read")
            if tokenizer.fingerprint != begun["tokenizer"]["fingerprint"]:
                name = begun["tokenizer"]["name"]
                raise ValueError(f"data.tokenizer: {name} changed while it was read")
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
    """Tokenize one range of documents. The shard counts once its facts, written last, are there."""
    ids_file = NewFile(folder / f"{shard_name(number)}.bin")
    ends_file = NewFile(folder / f"{shard_name(number)}.ends")
    first = number * begun["documents_per_shard"]
    end = min(first + begun["documents_per_shard"], begun["source"]["documents"])
    low, high, n_documents, n_tokens, n_bad = [], [], 0, 0, 0
    for block, n_read, n_bad_here in _blocks(documents, tokenizer, range(first, end)):
        n_bad += n_bad_here
        if not block:
            continue
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
        "file": f"{shard_name(number)}.bin",
        "documents": n_documents,
        "skipped": end - first - n_documents - n_bad,
        "bad": n_bad,
        "tokens": n_tokens,
        "min_id": min(low, default=None),
        "max_id": max(high, default=None),
        "sha256": sha256,
        "ends_sha256": ends_sha256,
    }
    write_new_file(folder / f"{shard_name(number)}.json", json.dumps(shard).encode())
    tell(Told(end - first, n_tokens, is_done=True))


def _blocks(
    documents: Documents, tokenizer: Tokenizer, indices: range
) -> Iterator[tuple[list[np.ndarray], int, int]]:
    """Blocks of tokenized documents, none empty; with each, how many documents were read so far,
    and how many could not be since the block before. The last block may have no documents."""
    block: list[np.ndarray] = []
    n_tokens = n_bad = 0
    for n_read, index in enumerate(indices, start=1):
        text = documents[index]
        assert text is None or isinstance(text, str), "what has ids needs none"
        n_bad += text is None
        if text:
            block.append(tokenizer.encode_document(text))
            n_tokens += len(block[-1])
        if n_tokens >= BLOCK_TOKENS:
            yield block, n_read, n_bad
            block, n_tokens, n_bad = [], 0, 0
    yield block, len(indices), n_bad


class NewFile:
    """A file that gets its name only once it is whole, and knows its hash."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # A name of its own, in case a worker outlives its parent for a moment.
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

    def remove(self) -> None:
        self._file.close()
        self._scratch.unlink(missing_ok=True)


def write_new_file(path: Path, content: bytes) -> None:
    file = NewFile(path)
    try:
        file.write(content)
        file.publish()
    except BaseException:  # Ctrl-C too leaves nothing behind
        file.remove()
        raise
    sync_folder(path.parent)


def shard_name(number: int) -> str:
    return f"shard-{number:05d}"
