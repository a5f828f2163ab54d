"""A web server on loopback that answers byte ranges, and fails as a test asks it to."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class WebServer(ThreadingHTTPServer):
    """Serves the files of a folder; a test sets what goes wrong."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.requests: list[tuple[str, str, str]] = []
        """(method, path, range) of each request."""
        self.cut_after: int | None = None
        """Bytes of a body after which connections are cut."""
        self.statuses: list[int] = []
        """Error codes of the next requests."""
        self.has_ranges = True
        self.has_etags = True
        self.redirect = ""
        """URL to which all requests are redirected."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: clients close connections that were cut."""


class Handler(BaseHTTPRequestHandler):
    server: WebServer

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        wanted = self.headers.get("Range", "")
        self.server.requests.append((self.command, self.path, wanted))
        path = self.server.folder / self.path.partition("?")[0].lstrip("/")
        if self.server.statuses:
            self.send_error(self.server.statuses.pop(0))
            return
        if self.server.redirect:
            self.send_response(302)
            self.send_header("Location", self.server.redirect)
            self.end_headers()
            return
        if not path.is_file():
            self.send_error(404)
            return
        status = path.stat()
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted) if self.server.has_ranges else None
        begin, end = (int(found[1]), int(found[2]) + 1) if found else (0, status.st_size)
        with path.open("rb") as file:
            file.seek(begin)
            body = file.read(end - begin)
        self.send_response(206 if found else 200)
        if found:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{status.st_size}")
        if self.server.has_etags:
            self.send_header("ETag", f'"{status.st_mtime_ns:x}-{status.st_size:x}"')
            self.send_header("Last-Modified", formatdate(status.st_mtime, usegmt=True))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            cut = self.server.cut_after
            self.wfile.write(body if cut is None else body[:cut])
            if cut is not None and len(body) > cut:
                self.wfile.flush()
                self.connection.shutdown(2)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing."""


@contextmanager
def web_server(folder: Path) -> Iterator[WebServer]:
    """Run a server of ``folder`` in a thread."""
    with WebServer(folder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
