"""The server of ``report --watch`` answers on loopback only, and with two files only."""

import gzip
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from report.watch import Source, build_server, is_loopback
from runtime import exit_codes
from tests.lib.metrics_files import lines_of, training_line, write_run
from tests.lib.patience import PATIENCE_SECONDS
from tests.lib.repository import ROOT
from tools import report


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", list(lines_of(20)))


@pytest.fixture
def port(folder: Path) -> Iterator[int]:
    """Port of a server whose secret is "token"."""
    source = Source(lambda: report.page_data([folder]), [folder])
    with build_server(source, "token", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def ask(port: int, path: str, *, host: str | None = None, method: str = "GET") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    if host != "":
        connection.putheader("Host", host or f"127.0.0.1:{port}")
    connection.endheaders()
    answer = connection.getresponse()
    assert "Access-Control-Allow-Origin" not in answer.headers
    return answer.status, answer.read()


def test_page_and_data_are_served(port: int) -> None:
    status, page = ask(port, "/token/")
    assert status == 200
    assert page.startswith(b"<!doctype html>")
    status, body = ask(port, "/token/data")
    data = json.loads(gzip.decompress(body))
    assert (status, data["runs"][0]["name"]) == (200, "run")
    assert ask(port, f"/token/data?{data['watch']['version']}") == (204, b"")


@pytest.mark.parametrize(
    "path",
    [
        "/", "/token", "/token/x", "/token/../token/", "/tokem/", "/tokem/data",
        "/token/metrics.jsonl", "/token/../../etc/passwd", "/token/%2e%2e/", "*",
    ],
)  # fmt: skip
def test_other_paths_are_not_found(port: int, path: str) -> None:
    assert ask(port, path)[0] == 404


@pytest.mark.parametrize(
    "host", ["", "evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.", "[::1]"]
)
def test_other_hosts_are_forbidden(port: int, host: str) -> None:
    for path in ("/token/", "/token/data"):
        assert ask(port, path, host=host)[0] == 403


def test_hosts_of_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.0.0.1:80", "localhost:9", "LOCALHOST")))
    assert not any(map(is_loopback, ("", ":80", "localhost:x", "127.0.0.1@evil", "localhost,evil")))


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "CONNECT"])
def test_other_methods_are_not_supported(port: int, method: str) -> None:
    assert ask(port, "/token/", method=method)[0] == 501


def test_server_listens_on_loopback_only(folder: Path, port: int) -> None:
    with build_server(Source(lambda: report.page_data([folder]), [folder]), "token", 0) as server:
        assert server.socket.getsockname()[0] == "127.0.0.1"
    # Where the host's name stands for another address too.
    addresses = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), port)}
    for address in addresses - {"127.0.0.1", "127.0.1.1", "::1"}:
        with pytest.raises(OSError, match=r"refused|unreachable"):
            socket.create_connection((address, port), timeout=5)


def test_data_are_read_again_only_if_a_file_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("report.watch.SECONDS", 0.0)
    monkeypatch.setattr("report.watch.TIMES", 0.0)
    n_read = []
    source = Source(lambda: n_read.append(1) or report.page_data([folder]), [folder])

    def read(version: str) -> str | None:
        data = source.newer_than(version)
        return None if data is None else json.loads(gzip.decompress(data))["watch"]["version"]

    first = read("")
    assert first is not None
    assert read(first) is None
    assert len(n_read) == 1
    with (folder / "metrics.jsonl").open("a") as file:
        print(json.dumps(training_line(21, random.Random(0))), file=file)
    second = read(first)
    assert second not in (None, first)
    assert read(second) is None
    assert len(n_read) == 2


def test_a_run_that_disappears_is_an_error_of_the_answer(
    folder: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("report.watch.MOST_SECONDS", 0.0)
    for name in ("metrics.jsonl", "config.toml"):
        (folder / name).unlink()
    for _ in range(2):
        status, body = ask(port, "/token/data")
        assert status == 500
        assert b"not a run" in body


def test_a_run_that_disappears_stays_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("report.watch.SECONDS", 0.0)
    monkeypatch.setattr("report.watch.TIMES", 0.0)
    source = Source(lambda: report.page_data([folder]), [folder])
    data = source.newer_than("")
    assert data is not None
    for name in ("metrics.jsonl", "config.toml"):
        (folder / name).unlink()
    for _ in range(3):
        with pytest.raises(OSError, match="not a run"):
            source.newer_than(json.loads(gzip.decompress(data))["watch"]["version"])


def test_command_serves_until_it_is_interrupted(folder: Path) -> None:
    command = [sys.executable, "-m", "tools.report", str(folder), "--watch", "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[1]
        port, _, path = address.removeprefix("http://127.0.0.1:").partition("/")
        assert len(path) > 20
        assert ask(int(port), f"/{path}")[0] == 200
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(PATIENCE_SECONDS) == exit_codes.DONE
    finally:
        process.kill()
        process.communicate()
