"""Tokenize documents into shards of token ids, in worker processes."""

import hashlib
import json
import os
import re
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

from data.sources import Documents
from data.token_files import (
    DTYPES,
    ENDS_DTYPE,
)
from data.tokenizer import Tokenizer, load_tokenizer
from runtime.filesystem import fsync_folder
from runtime.signals import handle_signals

# Tokens that a worker writes at once, before it reports progress.
BLOCK_TOKENS = 1 << 17
WORKER_TIMEOUT_SECONDS = 5.0
# Opens the documents of a source; returns them and their fingerprint.
OpenSource = Callable[[], tuple[Documents, str]]
# Names that ``AtomicFile`` gives to the files of a shard.
UNFINISHED = re.compile(r"shard-\d{5,}\.(bin|ends|json)\.[0-9a-f]{32}\.tmp")


class WorkerDied(Exception):
    """A worker process died."""


class WorkerReport(NamedTuple):
    """A worker's progress on its shard, sent after every block."""

    documents: int = 0
    tokens: int = 0
    is_done: bool = False
    error: str = ""


class Progress:
    """Progress line on stderr: updated in place on a terminal, else once a minute."""

    def __init__(self, n_documents: int, shards: list[dict[str, Any]]) -> None:
        self._n_documents = n_documents
        self._n_finished = sum(s["documents"] + s["skipped"] + s["bad"] for s in shards)
        self._reports: dict[int, WorkerReport] = {}
        self._is_terminal = sys.stderr.isatty()
        self._begin = self._shown = time.monotonic()

    def add(self, number: int, report: WorkerReport) -> None:
        """Record the latest report on shard ``number``."""
        self._reports[number] = report

    def show(self, *, is_last: bool = False) -> None:
        """Print the line if it is due, or if ``is_last``."""
        now = time.monotonic()
        if not is_last and now - self._shown < (0.5 if self._is_terminal else 60.0):
            return
        self._shown, seconds = now, max(now - self._begin, 1e-9)
        read = sum(report.documents for report in self._reports.values())
        tokens = sum(report.tokens for report in self._reports.values())
        left = (self._n_documents - self._n_finished - read) * seconds / max(read, 1)
        line = (
            f"{self._n_finished + read:,} of {self._n_documents:,} documents, {tokens:,} tokens,"
            f" {tokens / seconds:,.0f} tokens/s, {left:,.0f} s left"
        )
        start, end = ("\r\x1b[K", "\n" if is_last else "") if self._is_terminal else ("", "\n")
        print(f"{start}{line}", end=end, file=sys.stderr, flush=True)


def tokenize(
    folder: Path,
    open_source: OpenSource,
    plan: dict[str, Any],
    *,
    numbers: list[int],
    n_workers: int,
    progress: Progress,
) -> None:
    """Write the shards ``numbers`` in worker processes, to which ``open_source`` is sent.

    ``plan``: contents of begun.json.
    Raises a worker's error as ``ValueError``, and ``WorkerDied`` if one died.
    """
    pending = deque(numbers)
    busy: dict[Connection, int] = {}
    with _workers(min(n_workers, len(numbers)), folder, open_source, plan) as idle:
        while pending or busy:
            while pending and idle:
                connection = idle.pop()
                busy[connection] = pending.popleft()
                with suppress(BrokenPipeError):  # _receive reports a dead worker
                    connection.send(busy[connection])
            ready = connections.wait(list(busy), timeout=0.5)
            for connection in [connection for connection in busy if connection in ready]:
                report = _receive(connection)
                progress.add(busy[connection], report)
                if report.is_done:
                    del busy[connection]
                    idle.append(connection)
            progress.show()
    progress.show(is_last=True)


def _receive(connection: Connection) -> WorkerReport:
    try:
        report: WorkerReport = connection.recv()
    except (EOFError, ConnectionResetError):
        raise WorkerDied("a worker died; if it ran out of memory, use fewer --workers") from None
    if report.error:
        raise ValueError(report.error)
    return report


@contextmanager
def _workers(
    count: int, folder: Path, open_source: OpenSource, plan: dict[str, Any]
) -> Iterator[list[Connection]]:
    """Start workers that receive shard numbers; on exit, end them and delete unfinished files."""
    context = get_context("forkserver")
    # Workers are forked from a process that has imported what they need, and share its memory.
    context.set_forkserver_preload(["checkpoint.manifest", "data.sources", "data.tokenizer"])
    processes, workers = [], []
    # A terminal sends Ctrl-C to all its processes, but only this one may act on it.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for _ in range(count):
            connection, worker_end = context.Pipe()
            process = context.Process(target=_work, args=(worker_end, folder, open_source, plan))
            process.start()
            worker_end.close()
            processes.append(process)
            workers.append(connection)
        signal.signal(signal.SIGINT, handler)
        yield [*workers]
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for connection in workers:
            connection.close()
        # Workers exit by themselves when the pipe closes, and then leak no semaphore.
        deadline = time.monotonic() + WORKER_TIMEOUT_SECONDS
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
        for path in folder.glob("shard-*.tmp"):
            if UNFINISHED.fullmatch(path.name):
                # A worker that outlived a killed parent may rename its own.
                path.unlink(missing_ok=True)
        signal.signal(signal.SIGINT, handler)


def _work(
    connection: Connection, folder: Path, open_source: OpenSource, plan: dict[str, Any]
) -> None:
    """Write the shards whose numbers arrive, until the parent closes the pipe or is killed."""
    # The parent decides.
    handle_signals(signal.SIG_IGN)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            documents, fingerprint = open_source()
            markers = {key: plan["tokenizer"][key] for key in ("bos", "eos")}
            tokenizer = load_tokenizer(plan["tokenizer"]["name"], **markers)
            if fingerprint != plan["source"]["fingerprint"]:
                raise ValueError(f"data.path: {plan['source']['name']} changed while it was read")
            if tokenizer.fingerprint != plan["tokenizer"]["fingerprint"]:
                name = plan["tokenizer"]["name"]
                raise ValueError(f"data.tokenizer: {name} changed while it was read")
            while True:
                write_shard(folder, connection.recv(), documents, tokenizer, plan, connection.send)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except OSError as error:
            where = error.filename or folder
            text = f"{where}: {error.strerror or error}; finished shards are kept"
            connection.send(WorkerReport(error=text))
        except ValueError as error:
            connection.send(WorkerReport(error=str(error)))


def write_shard(
    folder: Path,
    number: int,
    documents: Documents,
    tokenizer: Tokenizer,
    plan: dict[str, Any],
    send: Callable[[WorkerReport], None],
) -> None:
    """Tokenize one shard's documents. Its metadata file, written last, marks it as finished."""
    ids_file = AtomicFile(folder / f"{shard_name(number)}.bin")
    ends_file = AtomicFile(folder / f"{shard_name(number)}.ends")
    first = number * plan["documents_per_shard"]
    end = min(first + plan["documents_per_shard"], plan["source"]["documents"])
    min_ids, max_ids, n_documents, n_tokens, n_bad = [], [], 0, 0, 0
    for block, n_read, n_bad_in_block in _blocks(
        documents, tokenizer, range(first, end), skips_bad=plan["skips_bad"]
    ):
        n_bad += n_bad_in_block
        if not block:
            continue
        ids = np.concatenate(block)
        min_ids.append(int(ids.min()))
        max_ids.append(int(ids.max()))
        assert 0 <= min_ids[-1] <= max_ids[-1] < tokenizer.n_vocab, "ids below n_vocab"
        ids_file.write(ids.astype(DTYPES[plan["dtype"]]).tobytes())
        ends = n_tokens + np.cumsum([len(document) for document in block])
        ends_file.write(ends.astype(ENDS_DTYPE).tobytes())
        n_documents, n_tokens = n_documents + len(block), int(ends[-1])
        send(WorkerReport(n_read, n_tokens))
    sha256, ends_sha256 = ids_file.publish(), ends_file.publish()
    fsync_folder(folder)
    shard = {
        "file": f"{shard_name(number)}.bin",
        "documents": n_documents,
        "skipped": end - first - n_documents - n_bad,
        "bad": n_bad,
        "tokens": n_tokens,
        "min_id": min(min_ids, default=None),
        "max_id": max(max_ids, default=None),
        "sha256": sha256,
        "ends_sha256": ends_sha256,
    }
    atomic_write_bytes(folder / f"{shard_name(number)}.json", json.dumps(shard).encode())
    send(WorkerReport(end - first, n_tokens, is_done=True))


def _blocks(
    documents: Documents, tokenizer: Tokenizer, indices: range, *, skips_bad: bool
) -> Iterator[tuple[list[np.ndarray], int, int]]:
    """Yield (nonempty tokenized documents, documents read so far, bad ones since the last block).

    The last block may have no documents.
    """
    block: list[np.ndarray] = []
    n_tokens = n_bad = 0
    for n_read, index in enumerate(indices, start=1):
        text = documents[index]
        if not isinstance(text, str | None):
            raise ValueError("data.source: its documents are token ids, which need no preparing")
        ids = None
        if text:
            try:
                ids = tokenizer.encode_document(text)
            except ValueError as error:
                if not skips_bad:
                    raise ValueError(f"data.path: document {index} {error}") from None
        n_bad += text is None or (text != "" and ids is None)
        if ids is not None:
            block.append(ids)
            n_tokens += len(ids)
        if n_tokens >= BLOCK_TOKENS:
            yield block, n_read, n_bad
            block, n_tokens, n_bad = [], 0, 0
    yield block, len(indices), n_bad


class AtomicFile:
    """A file that gets its name only when it is complete; computes its SHA-256."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # A unique name, because a worker may outlive its parent for a moment.
        self._temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
        self._file = self._temporary.open("xb")
        self._digest = hashlib.sha256()

    def write(self, content: bytes) -> None:
        self._digest.update(content)
        self._file.write(content)

    def publish(self) -> str:
        """Sync the contents, rename the file, return its SHA-256. Does not sync the folder."""
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        self._temporary.rename(self._path)
        return self._digest.hexdigest()

    def discard(self) -> None:
        """Close and delete the unfinished file."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def atomic_write_bytes(path: Path, content: bytes) -> None:
    """Write ``content`` atomically and durably."""
    file = AtomicFile(path)
    try:
        file.write(content)
        file.publish()
    except BaseException:  # also Ctrl-C
        file.discard()
        raise
    fsync_folder(path.parent)


def shard_name(number: int) -> str:
    """Return the file name of a shard, without its suffix."""
    return f"shard-{number:05d}"
