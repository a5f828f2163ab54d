"""Files of a web server that fails in every way, and of memory; what is requested of them."""

import errno
import gzip
import os
import random
import socket
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import fsspec
import pytest

from config.constraints import CONFIG_CONSTRAINTS
from config.job_config import DataSource, JobConfig
from data import remote, remote_errors, storage
from data.files import relative_names
from data.matching import match_paths
from data.remote import MAX_RANGE_BYTES, RemoteFile
from data.remote_errors import StorageError, masked
from data.sources import open_documents
from data.storage import copy_remote, local_path
from tests.lib.formats import lines, parquet
from tests.lib.stored import SOURCES, assert_same_source, write_every_kind
from tests.lib.web_server import WebServer, web_server
from tools.cli import path_argument

LONG = random.Random(0).randbytes(MAX_RANGE_BYTES + 300_000)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(remote_errors, "FIRST_DELAY", 0.001)
    monkeypatch.setattr(remote_errors, "RETRY_SECONDS", 0.5)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WebServer]:
    folder = tmp_path / "served"
    folder.mkdir()
    with web_server(folder) as found:
        yield found


@pytest.fixture
def long_file(server: WebServer) -> RemoteFile:
    (server.folder / "long.bin").write_bytes(LONG)
    return RemoteFile(f"{server.url}/long.bin")


@pytest.mark.parametrize(
    ("kind", "path"), [source for source in SOURCES if not set("*?[") & set(source[1])]
)
def test_web_server_gives_the_documents_of_the_disk(
    tmp_path: Path, server: WebServer, kind: str, path: str
) -> None:
    write_every_kind(server.folder)
    assert_same_source(kind, f"{server.folder}/{path}", f"{server.url}/{path}")


def test_name_in_a_url_is_unquoted(server: WebServer) -> None:
    write_every_kind(server.folder)
    (server.folder / "a%20b.txt").write_text("text of a b.txt\n")
    assert_same_source("files", f"{server.folder}/text/a b.txt", f"{server.url}/a%20b.txt")


def test_patterns_match_as_on_a_disk(tmp_path: Path) -> None:
    """Of random trees and patterns: the same names in the same order, or none."""
    generator, system = random.Random(1), fsspec.filesystem("memory")
    parts = ["a", "b", "ab", ".a", "a-b", "B"]
    for trial in range(60):
        root = tmp_path / str(trial)
        for _ in range(8):
            folder = root.joinpath(*generator.choices(parts, k=generator.randrange(3)))
            # Also files with the names of folders elsewhere in the tree.
            file = folder / f"{generator.choice(parts)}{generator.choice(['', '.txt'])}"
            if not file.is_dir() and not any(each.is_file() for each in file.parents):
                folder.mkdir(parents=True, exist_ok=True)
                file.write_text("x")
                system.pipe(f"/patterns/{trial}/{file.relative_to(root).as_posix()}", b"x")
        for _ in range(20):
            pieces = [*parts, "*", "**", "[ab]", ".*", "?", "a*"]
            pattern = "/".join(
                [*generator.choices(pieces, k=generator.randrange(3)), generator.choice(
                    ["*", "**", "*.txt", "a.txt", ".a*", "?.txt", "a"])]
            )  # fmt: skip
            patterns = [f"{at}/{pattern}" for at in (root, f"memory://patterns/{trial}")]
            assert names(patterns[1]) == names(patterns[0]), pattern
    system.rm("/patterns", recursive=True)


def names(pattern: str) -> list[str]:
    """Names of the files that a pattern matches, in their order."""
    paths = [path for path in match_paths(pattern) if not path.is_dir()]
    return [name for _, name in relative_names(pattern, paths)]


def test_reader_reads_what_a_file_has(long_file: RemoteFile) -> None:
    generator = random.Random(2)
    with long_file.open() as file:
        for _ in range(60):
            start = generator.choice([generator.randrange(len(LONG)), len(LONG) - 8, 0])
            size = generator.choice([1, 5000, 200_000, -1 if start > MAX_RANGE_BYTES else 7])
            assert file.seek(start) == start
            assert file.read(size) == LONG[start : start + size if size > 0 else None]
            assert file.tell() == min(len(LONG), start + size if size > 0 else len(LONG))


def test_parquet_is_read_by_ranges(server: WebServer) -> None:
    """The bytes of a row group, and of the footer: not of the file."""
    texts = [f"{number} {os.urandom(400).hex()}" for number in range(4000)]
    content = parquet(texts, row_group_size=100, compression="none")
    (server.folder / "x.parquet").write_bytes(content)
    documents, _ = open_documents(DataSource(path=f"{server.url}/x.parquet"))
    assert documents[1234] == texts[1234]
    wanted = [each.removeprefix("bytes=").split("-") for _, _, each in server.requests if each]
    assert 0 < sum(int(end) + 1 - int(begin) for begin, end in wanted) < len(content) / 4


def test_cut_connections_are_resumed(server: WebServer, long_file: RemoteFile) -> None:
    server.cut_after = 100_000
    assert local_path(long_file).read_bytes() == LONG
    with long_file.open() as file:
        assert file.read() == LONG


def test_server_that_is_away_for_a_moment(
    server: WebServer, long_file: RemoteFile, captured_log: pytest.LogCaptureFixture
) -> None:
    long_file.stat()
    server.statuses = [503, 500, 429]
    assert local_path(long_file).read_bytes() == LONG
    assert len({record.getMessage() for record in captured_log.records}) == 3


def test_connection_that_is_always_cut_is_an_error(
    server: WebServer, long_file: RemoteFile
) -> None:
    server.cut_after = 1000
    with pytest.raises(StorageError, match=rf"{server.url}/long.bin: .* repeated for \d+ s") as hit:
        local_path(long_file)
    assert hit.value.errno == errno.EIO
    assert not [path for path in storage.cache_folder().iterdir() if path.suffix == ".bin"]


def test_server_that_is_gone_is_an_error_that_a_restart_may_help(server: WebServer) -> None:
    (server.folder / "x.txt").write_text("x")
    server.statuses = [500] * 1000
    with pytest.raises(OSError, match=rf"{server.url}/x.txt: .*500") as hit:
        open_documents(DataSource(path=f"{server.url}/x.txt"))
    assert not isinstance(hit.value, ValueError)
    url = "http://127.0.0.1:1/x.txt"
    with pytest.raises(OSError, match=rf"{url}: .*[Cc]onnect") as hit:
        open_documents(DataSource(path=url))


@pytest.mark.parametrize(
    ("status", "problem"),
    [(404, "no file matches .* the server has no such file"), (403, "Forbidden"), (410, "Gone")],
)
def test_what_the_server_denies_is_the_users_mistake(
    server: WebServer, status: int, problem: str
) -> None:
    server.statuses = [status] * 20
    url = f"{server.url}/x.txt"
    with pytest.raises(ValueError, match=rf"data.path: .*{problem}") as hit:
        open_documents(DataSource(path=url))
    assert url in str(hit.value)
    assert len(server.statuses) > 10


def test_torn_file_is_named(server: WebServer) -> None:
    (server.folder / "x.jsonl.gz").write_bytes(gzip.compress(lines(["a"] * 9000))[:-50])
    with pytest.raises(ValueError, match=rf"{server.url}/x.jsonl.gz.*: truncated or corrupt gzip"):
        open_documents(DataSource(path=f"{server.url}/x.jsonl.gz"))


def test_server_without_ranges_is_named(server: WebServer, long_file: RemoteFile) -> None:
    server.has_ranges = False
    with pytest.raises(StorageError, match=rf"{server.url}/long.bin: .*ignores byte ranges") as hit:
        long_file.open().read()
    assert hit.value.is_mistake


def test_pattern_of_a_web_server_is_rejected(server: WebServer) -> None:
    with pytest.raises(ValueError, match="a web server has no list of its files"):
        open_documents(DataSource(path=f"{server.url}/*.txt"))


def test_file_that_changes_while_it_is_copied(
    server: WebServer, long_file: RemoteFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_file.stat()
    path = server.folder / "long.bin"
    path.write_bytes(LONG[::-1])
    os.utime(path, (1, 1))
    with pytest.raises(StorageError, match=rf"{server.url}/long.bin changed while it was read"):
        local_path(long_file)
    # A new one is copied, under another name.
    assert local_path(RemoteFile(long_file.url)).read_bytes() == LONG[::-1]


def test_one_process_of_a_node_copies_a_file(server: WebServer, long_file: RemoteFile) -> None:
    with ThreadPoolExecutor(4) as threads:
        ranks = [RemoteFile(long_file.url) for _ in range(4)]
        copies = set(threads.map(local_path, ranks))
    (copy,) = copies
    assert copy.read_bytes() == LONG
    assert len([method for method, _, wanted in server.requests if wanted]) == 2
    # A process that was killed leaves a part, and the next one begins again.
    copy.rename(copy.with_name(f"{copy.name}.{socket.gethostname()}.part"))
    assert local_path(long_file).read_bytes() == LONG
    assert not [*copy.parent.glob("*.part")]


def test_nodes_without_common_locks_copy_apart(
    long_file: RemoteFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another node copies the same file to the same folder while this one does."""
    monkeypatch.setattr(storage, "cache_lock", nullcontext)
    write_range, is_first = storage._write_range, iter([True])

    def interrupted(*arguments: Any) -> None:
        write_range(*arguments)
        if next(is_first, False):
            monkeypatch.setattr(socket, "gethostname", lambda: "other")
            assert local_path(RemoteFile(long_file.url)).read_bytes() == LONG

    monkeypatch.setattr(storage, "_write_range", interrupted)
    copy = storage._copy_of(long_file)
    copy.parent.mkdir()
    assert local_path(long_file).read_bytes() == LONG
    assert [*copy.parent.iterdir()] == [copy]


def test_full_cache_is_named(long_file: RemoteFile, monkeypatch: pytest.MonkeyPatch) -> None:
    full = SimpleNamespace(free=5)
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: full)
    with pytest.raises(StorageError, match=rf"{len(LONG):,} bytes do not fit .*5 free.*HF_HOME"):
        copy_remote([long_file])
    # What a process that was killed has copied is overwritten.
    part = storage._part_of(storage._copy_of(long_file))
    part.parent.mkdir(exist_ok=True)
    part.write_bytes(LONG)
    full.free = 0
    copy_remote([long_file])
    assert local_path(long_file).read_bytes() == LONG


def test_names_of_copies_fit_into_the_limit_of_bytes(long_file: RemoteFile) -> None:
    file = RemoteFile(f"{long_file.url.rpartition('/')[0]}/{'世' * 80}.txt", long_file.stat())
    copy = storage._copy_of(file)
    assert len(storage._part_of(copy).name.encode()) < 255
    assert copy.name.endswith("世.txt")


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    remote._file_system.cache_clear()
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ValueError, match=r"data.path: gs://: .* -m pip install gcsfs"):
        open_documents(DataSource(path="gs://bucket/*.txt"))


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("nosuch://bucket/a.txt", "nosuch"),
        ("file:///data/a.txt", "a local path has no file://"),
    ],
)
def test_unknown_scheme_is_named(path: str, problem: str) -> None:
    with pytest.raises(ValueError, match=rf"data.path: {path[:6]}.*{problem}"):
        open_documents(DataSource(path=path))


def test_secrets_of_a_redirection_are_not_repeated(
    server: WebServer, captured_log: pytest.LogCaptureFixture
) -> None:
    with web_server(server.folder) as other:
        # The error of this server has the URL.
        other.statuses = [403] * 100
        server.redirect = f"{other.url}/x.txt?X-Amz-Signature=SECRET"
        with pytest.raises((StorageError, ValueError)) as hit:
            open_documents(DataSource(path=f"{server.url}/x.txt"))
    assert "SECRET" not in str(hit.value) + captured_log.text
    assert masked("at 's3://me:SECRET@h/x'") == "at 's3://me:***@h/x'"


def test_folders_that_are_written_are_local() -> None:
    with pytest.raises(ArgumentTypeError, match="s3://bucket/run is a URL, not a path"):
        path_argument("s3://bucket/run")
    config = JobConfig.model_validate({"job": {"output_dir": "s3://bucket/runs"}})
    violated = [each.message(config) for each in CONFIG_CONSTRAINTS if each.violated(config)]
    assert violated == ["job.output_dir: must be a folder of the file system, not a URL"]
