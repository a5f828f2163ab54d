"""Files of a bucket are read like the same files on a disk; a real S3 server on loopback."""

import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import s3fs
from moto.server import ThreadedMotoServer

from config.job_config import Data, DataSource
from data import remote, storage
from data.remote_errors import StorageError
from data.remote_matching import match_urls
from data.sources import build_sources, open_documents
from tests.lib.formats import parquet
from tests.lib.stored import SOURCES, assert_same_source, write_every_kind

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "user", "AWS_SECRET_ACCESS_KEY": "secret"}


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local")
    write_every_kind(folder)
    return folder


@pytest.fixture(scope="module")
def bucket(local: Path) -> Iterator[Any]:
    """File system of a server that has the files in s3://books/data."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        settings = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_REGION": "us-east-1"}
        for name, value in (settings | CREDENTIALS).items():
            patch.setenv(name, value)
        system = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
        system.mkdir("books")
        system.put(str(local), "books/data", recursive=True)
        # A folder that a browser of buckets made.
        system.touch("books/data/text/made/")
        yield system
    server.stop()
    remote._file_system.cache_clear()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.mark.parametrize(("kind", "pattern"), SOURCES)
def test_bucket_gives_the_documents_of_the_disk(
    bucket: Any, local: Path, kind: str, pattern: str
) -> None:
    assert_same_source(kind, f"{local}/{pattern}", f"s3://books/data/{pattern}")


def test_mixture_of_buckets_is_the_mixture_of_the_disk(bucket: Any, local: Path) -> None:
    def build(root: str) -> tuple[list[str], list[str]]:
        paths = {"a": f"{root}/text/**/*.txt", "b": f"{root}/tables/*.parquet"}
        sources = [DataSource(path=path, name=name) for name, path in paths.items()]
        train, held_out = build_sources(Data(sources=sources), seed=1)
        read = [s.documents(row, 3, 2) for s in (*train, *held_out.values()) for row in range(3)]
        return [s.fingerprint for s in train], [str(next(rows)) for rows in read]

    assert build("s3://books/data") == build(str(local))


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("s3://nowhere/a.txt", "no file matches .* there is no s3://nowhere"),
        ("s3://nowhere/*.txt", "no file matches .* there is no s3://nowhere"),
        ("s3://books/data/nothing.txt", "no file matches"),
        ("s3://books/data/text", "it is a folder: try s3://books/data/text/"),
        ("s3://books/data/{text,rows}/*", "braces"),
        ("s3://*/a.txt", "needs a bucket's name"),
        ("s3://", "needs a bucket's name"),
        ("s3://b@d!/a.txt", "s3://b@d!/a.txt.*[Ii]nvalid bucket name"),
    ],
)
def test_path_without_files_is_named(bucket: Any, path: str, problem: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s)data.path: .*{problem}"):
        open_documents(DataSource(path=path))


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("s3://books/data/text", "has no index.json"),
        ("s3://books/data/tokens/nothing.idx", "no such file"),
        ("s3://books/data/*.idx", "no folder and no .idx file matches"),
    ],
)
def test_missing_tokens_are_named(bucket: Any, path: str, problem: str) -> None:
    with pytest.raises(ValueError, match=rf"{problem}"):
        open_documents(DataSource(type="tokens", path=path))


def test_truncated_shard_is_named_and_not_copied(bucket: Any) -> None:
    bucket.cp("books/data/tokens/prepared", "books/torn", recursive=True)
    bucket.pipe("books/torn/shard-00001.bin", b"1")
    with pytest.raises(ValueError, match=r"s3://books/torn/shard-00001.bin has 1 bytes, not 182"):
        open_documents(DataSource(type="tokens", path="s3://books/torn"))
    assert not storage.cache_folder().exists()


def test_missing_credentials_are_named(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    remote._file_system.cache_clear()
    with pytest.raises(ValueError, match=r"s3://books/.*[Cc]redentials.*AWS_ACCESS_KEY_ID"):
        open_documents(DataSource(path="s3://books/data/text/long.txt"))
    remote._file_system.cache_clear()


def test_changed_object_is_an_error_and_not_read(bucket: Any) -> None:
    """Of the same size, so that only its ETag differs."""
    texts = [[f"{word} {i} {os.urandom(5000).hex()}" for i in range(90)] for word in "ab"]
    contents = [parquet(each, row_group_size=9, compression="none") for each in texts]
    assert len(contents[0]) == len(contents[1])
    bucket.pipe("books/changing.parquet", contents[0])
    documents, _ = open_documents(DataSource(path="s3://books/changing.parquet"))
    assert documents[0] == texts[0][0]
    bucket.pipe("books/changing.parquet", contents[1])
    with pytest.raises(StorageError, match=r"s3://books/changing.parquet changed while"):
        documents[50]
    documents, _ = open_documents(DataSource(path="s3://books/changing.parquet"))
    assert documents[50] == texts[1][50]


def test_objects_written_after_a_checkpoint_are_named(bucket: Any) -> None:
    (source,), _ = build_sources(Data(source="files", path="s3://books/data/rows/*.gz"), seed=0)
    (path,) = source.changed_since(0.0)
    written = path.stat().st_ctime
    assert str(path) == "s3://books/data/rows/a.jsonl.gz"
    assert source.changed_since(written - 1.0) == [path]
    assert source.changed_since(written + 1.0) == []


def test_ranks_of_one_launcher_list_a_bucket_once(
    bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.pipe({"books/list/a.txt": b"a", "books/list/b.txt": b"b"})
    monkeypatch.setenv("LAUNCHER_PID", str(os.getpid()))
    first = match_urls("s3://books/list/*.txt")
    assert [file.name for file in first] == ["a.txt", "b.txt"]
    bucket.pipe("books/list/c.txt", b"c")
    again = match_urls("s3://books/list/*.txt")
    assert [file.as_json() for file in again] == [file.as_json() for file in first]
    # So do those of another node with the same cache, and neither replaces the other's list.
    with monkeypatch.context() as other:
        other.setattr(socket, "gethostname", lambda: "other")
        assert len(match_urls("s3://books/list/*.txt")) == 3
    again = match_urls("s3://books/list/*.txt")
    assert [file.as_json() for file in again] == [file.as_json() for file in first]
    # Ranks of another launcher, and programs without one, list it again.
    for launcher in (str(os.getppid()), ""):
        monkeypatch.setenv("LAUNCHER_PID", launcher)
        assert len(match_urls("s3://books/list/*.txt")) == 3
