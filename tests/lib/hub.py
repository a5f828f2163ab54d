"""A server on this machine that speaks the API of the Hugging Face Hub, for one repository."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

LFS_SUFFIXES = (".safetensors", ".model")
GATED = (403, "GatedRepo")


@dataclass
class Hub:
    """A repository and its faults; they may change while the server runs."""

    files: dict[str, bytes]
    repository: str = "owner/model"
    kind: Literal["models", "datasets"] = "models"
    history: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Files of earlier commits."""
    status: tuple[int, str] | None = None
    """Status and error code of all answers, if not 200."""
    drops: dict[str, int] = field(default_factory=dict)
    """File to the number of its downloads that end in the middle."""
    corrupt: set[str] = field(default_factory=set)
    """Files of which other bytes are sent."""
    requests: list[str] = field(default_factory=list)
    endpoint: str = ""

    @property
    def commit(self) -> str:
        content = repr(sorted(self.files.items())).encode()
        return hashlib.sha1(content).hexdigest()

    def push(self, files: dict[str, bytes]) -> None:
        self.history[self.commit] = self.files
        self.files = files

    def at(self, revision: str) -> "Hub | None":
        """The repository at a branch or commit; None if it has no such revision."""
        if revision in ("main", self.commit):
            return self
        files = self.history.get(revision)
        return None if files is None else replace(self, files=files)

    def entry(self, name: str) -> dict[str, Any]:
        content = self.files[name]
        entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content)}
        entry["oid"] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        if name.endswith(LFS_SUFFIXES):
            digest = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
        return entry

    def environment(self, home: Path) -> dict[str, str]:
        """Variables of a process that uses this hub, with its cache in ``home``."""
        return {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Serve ``hub`` on a free port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer(self, hub)

        def do_HEAD(self) -> None:
            answer(self, hub)

        def do_POST(self) -> None:
            answer(self, hub)

        def log_message(self, format: str, *values: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def answer(request: BaseHTTPRequestHandler, hub: Hub) -> None:
    path = unquote(urlsplit(request.path).path)
    body = request.rfile.read(int(request.headers.get("Content-Length") or 0)).decode()
    hub.requests.append(f"{request.command} {path}")
    api, files = f"/api/{hub.kind}/{hub.repository}", f"/{hub.repository}"
    if hub.kind == "datasets":
        files = f"/datasets{files}"
    # What is asked of which revision: "revision", "tree", "paths-info" or "resolve".
    what, _, rest = path.removeprefix(api).removeprefix(files).strip("/").partition("/")
    revision, _, name = rest.partition("/")
    found = hub.at(revision or "main")
    if hub.status is not None:
        send(request, b"{}", status=hub.status[0], code=hub.status[1])
    elif not path.startswith((f"{api}/", f"{files}/")) and path != api:
        send(request, b"{}", status=404, code="RepoNotFound")
    elif found is None:
        send(request, b"{}", status=404, code="RevisionNotFound")
    elif what == "tree":
        send_json(request, [found.entry(name) for name in sorted(found.files)])
    elif what == "paths-info":
        wanted = json.loads(body)["paths"]
        send_json(request, [found.entry(name) for name in wanted if name in found.files])
    elif what in ("", "revision"):
        siblings = [{"rfilename": name} for name in sorted(found.files)]
        send_json(request, {"id": hub.repository, "sha": found.commit, "siblings": siblings})
    elif name in found.files:
        send_file(request, found, name)
    else:
        send(request, b"{}", status=404, code="EntryNotFound")


def send_file(request: BaseHTTPRequestHandler, hub: Hub, name: str) -> None:
    content, entry = hub.files[name], hub.entry(name)
    etag = entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]
    headers = {"ETag": f'"{etag}"', "X-Repo-Commit": hub.commit, "Accept-Ranges": "bytes"}
    first = int((request.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
    sent = bytes(len(content)) if name in hub.corrupt else content
    is_whole = True
    if request.command == "GET" and hub.drops.get(name, 0) > 0:
        hub.drops[name] -= 1
        is_whole = False
    status = 206 if first else 200
    send(request, sent[first:], status=status, headers=headers, is_whole=is_whole)


def send_json(request: BaseHTTPRequestHandler, content: Any) -> None:
    send(request, json.dumps(content).encode(), headers={"Content-Type": "application/json"})


def send(
    request: BaseHTTPRequestHandler,
    content: bytes,
    *,
    status: int = 200,
    code: str = "",
    headers: dict[str, str] | None = None,
    is_whole: bool = True,
) -> None:
    request.send_response(status)
    for key, value in (headers or {}).items():
        request.send_header(key, value)
    if code:
        request.send_header("X-Error-Code", code)
    request.send_header("Content-Length", str(len(content)))
    request.end_headers()
    if request.command == "GET":
        request.wfile.write(content if is_whole else content[: len(content) // 2])
    if not is_whole:
        request.close_connection = True
        request.connection.shutdown(2)
