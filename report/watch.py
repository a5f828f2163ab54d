"""Serve the report of runs that go on, on loopback: the page, and its data whenever they changed.

The address has a secret, because other users of the machine can connect to loopback. The Host
header must name loopback, or a page elsewhere could read the data through its own name (DNS
rebinding).
"""

import hmac
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from report.page import compressed, render
from runtime.log import say

HOSTS = {"127.0.0.1", "localhost"}
WATCHED = (
    "metrics.jsonl",
    "alarms.jsonl",
    "config.toml",
    "samples.jsonl",
    "control/*",
    "provenance/*",
)
# A page asks after this many seconds or, if longer, this many times what an answer took.
SECONDS, TIMES = 2.0, 10.0
# Without a new line, a run is read again after this long: it may have become quiet.
MOST_SECONDS = 60.0


class Source:
    """The newest data, built when a request finds that a run's files have changed."""

    def __init__(self, build: Callable[[], dict[str, Any]], folders: Sequence[Path]) -> None:
        self._build, self._folders, self._lock = build, folders, Lock()
        self._version = self._wait = 0.0
        self._read()

    def newer_than(self, version: str) -> bytes | None:
        """Return the data, gzipped; None if they are of ``version`` still."""
        with self._lock:
            age = time.monotonic() - self._version
            if age > MOST_SECONDS or (age > self._wait and self._stamps() != self._seen):
                self._read()
            return None if version == str(self._version) else self._data

    def _read(self) -> None:
        # Before the files: what is written meanwhile is read the next time.
        stamps, begin = self._stamps(), time.monotonic()
        data = self._build()
        self._seen = stamps
        self._version = time.monotonic()
        self._wait = max(SECONDS, TIMES * (self._version - begin))
        data["watch"] = {"version": str(self._version), "seconds": self._wait}
        self._data = compressed(data)

    def _stamps(self) -> list[tuple[str, int, int]]:
        return [stamp for folder in self._folders for stamp in _stamps(folder)]


def _stamps(folder: Path) -> Iterator[tuple[str, int, int]]:
    for path in (path for pattern in WATCHED for path in sorted(folder.glob(pattern))):
        with suppress(OSError):
            status = os.lstat(path)
            yield str(path), status.st_size, status.st_mtime_ns


def serve(build: Callable[[], dict[str, Any]], folders: Sequence[Path], port: int) -> None:
    """Serve what ``build`` returns until Ctrl-C. Raises ``OSError`` if the port is in use."""
    source, token = Source(build, folders), secrets.token_urlsafe(16)
    try:
        server = build_server(source, token, port)
    except OSError as error:
        raise OSError(
            error.errno, f"{error.strerror}; choose another one", f"--port {port}"
        ) from None
    with server:
        say(f"report: http://127.0.0.1:{server.server_address[1]}/{token}/ (Ctrl-C ends it)")
        sys.stdout.flush()
        with suppress(KeyboardInterrupt):
            server.serve_forever()


def build_server(source: Source, token: str, port: int) -> ThreadingHTTPServer:
    """Listen on loopback. Answers GET of ``/<token>/`` and ``/<token>/data`` only."""
    page = render(None)

    class Handler(BaseHTTPRequestHandler):
        timeout = 30.0

        def do_GET(self) -> None:
            if not is_loopback(self.headers.get("Host", "")):
                return self._answer(403, b"this server answers on localhost only\n", "text/plain")
            path, _, query = self.path.partition("?")
            if hmac.compare_digest(path.encode(), f"/{token}/".encode()):
                return self._answer(200, page, "text/html; charset=utf-8")
            if not hmac.compare_digest(path.encode(), f"/{token}/data".encode()):
                return self._answer(404, b"not found\n", "text/plain")
            try:
                data = source.newer_than(query)
            except (OSError, ValueError) as error:
                return self._answer(500, f"{error}\n".encode(errors="replace"), "text/plain")
            if data is None:
                return self._answer(204, b"", "")
            return self._answer(200, data, "application/json")

        def _answer(self, code: int, body: bytes, kind: str) -> None:
            with suppress(ConnectionError):  # A page that was closed does not wait for it.
                self._send(code, body, kind)

        def _send(self, code: int, body: bytes, kind: str) -> None:
            self.send_response(code)
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Referrer-Policy", "no-referrer")
            self.send_header("Cross-Origin-Resource-Policy", "same-origin")
            self.send_header("X-Frame-Options", "DENY")
            if body:
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
            if kind == "application/json":
                self.send_header("Content-Encoding", "gzip")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log no requests."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def is_loopback(host: str) -> bool:
    """True if a Host header names loopback; any port, because a tunnel may have another."""
    name, _, port = host.partition(":")
    return name.lower() in HOSTS and (not port or port.isdecimal())
