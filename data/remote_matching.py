"""Remote files that a URL's pattern matches: those that the same local pattern would match."""

import hashlib
import json
import os
import socket
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from data.files import WILDCARD
from data.remote import RemoteFile, file_system, is_http, parse_info
from data.remote_errors import StorageError, repeated
from data.storage import cache_file, cache_lock
from runtime.filesystem import atomic_write_text, parse_object


def match_urls(pattern: str, *, folder_file: str = "") -> list[RemoteFile]:
    """Sorted files that ``pattern`` matches, and folders with a file named ``folder_file``.

    A file with the very name of the pattern is its only match. The ranks that one launcher starts
    list a bucket once. Raises ``ValueError`` for a pattern of a web server and one without a
    bucket, and as ``repeated`` does.
    """
    launch = _launch()
    if not launch:
        return _match(pattern, folder_file)
    # Launchers of several nodes may share the cache, and would replace each other's list.
    names = f"{socket.gethostname()}\n{pattern}\n{folder_file}"
    key = hashlib.sha256(names.encode()).hexdigest()[:32]
    path = cache_file(f"{key}.json")
    with cache_lock(path):
        saved = parse_object(path.read_bytes()) if path.exists() else {}
        if saved.get("launch") != launch:
            files = [file.as_json() for file in _match(pattern, folder_file)]
            saved = {"launch": launch, "files": files}
            atomic_write_text(path, json.dumps(saved))
    return [RemoteFile.from_json(*file) for file in saved["files"]]


def _launch() -> str:
    """Name of the launcher that started this rank, unlike that of any other; "" without one."""
    pid = os.environ.get("LAUNCHER_PID", "")
    try:
        # The number of a process may be used again, but not with the time of its start.
        fields = Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return ""
    return f"{socket.gethostname()} {pid} {fields[19]}"


def _match(pattern: str, folder_file: str) -> list[RemoteFile]:
    scheme, _, path = pattern.partition("://")
    if is_http(pattern) and WILDCARD.search(path):
        text = "a web server has no list of its files: give each URL its own [[data.sources]]"
        raise ValueError(f"data.path: {pattern}: {text}")
    file_system(pattern)
    bucket = path.partition("/")[0]
    if not bucket or WILDCARD.search(bucket):
        raise ValueError(f"data.path: {pattern}: {scheme}://BUCKET/PATTERN needs a bucket's name")
    exact = RemoteFile(pattern)
    if exact.exists():
        return [exact]
    if not WILDCARD.search(path):
        return []
    root = os.path.dirname(WILDCARD.split(pattern)[0])
    parts = [part for part in pattern[len(root) :].split("/") if part]
    found = [RemoteFile(url, parse_info(url, info)) for url, info in _expand(root, parts)]
    if folder_file:
        folders = (os.path.dirname(url) for url, _ in _expand(root, [*parts, folder_file]))
        found += [RemoteFile(folder, is_folder=True) for folder in folders]
    return sorted(found)


def name_matches(name: str, part: str) -> bool:
    """True if one part of a path matches; hidden names match only a part that begins with a dot."""
    return fnmatchcase(name, part) and (part.startswith(".") or not name.startswith("."))


def _expand(folder: str, parts: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (URL, facts of the file system) of the files below ``folder`` that match."""
    part, *rest = parts
    if rest and not WILDCARD.search(part):
        yield from _expand(f"{folder}/{part}", rest)
        return
    is_deep = part == "**"
    for url, info in _list(folder, is_deep=is_deep):
        is_folder = info["type"] == "directory"
        if is_deep:
            if not is_folder and _names_match(url[len(folder) + 1 :].split("/"), parts):
                yield url, info
        elif not name_matches(os.path.basename(url), part):
            continue
        elif rest and is_folder:
            yield from _expand(url, rest)
        elif not rest and not is_folder:
            yield url, info


def _names_match(names: list[str], parts: list[str]) -> bool:
    """True if a path of ``names`` matches ``parts``, where ``**`` is any number of folders."""
    if not parts or not names:
        return not parts and not names
    part, *rest = parts
    if part != "**":
        return name_matches(names[0], part) and _names_match(names[1:], rest)
    if _names_match(names, rest or ["*"]):
        return True
    return not names[0].startswith(".") and _names_match(names[1:], parts)


def _list(folder: str, *, is_deep: bool) -> list[tuple[str, dict[str, Any]]]:
    """(URL, facts of the file system) of what is in ``folder``, or of all files below it."""
    from fsspec.core import strip_protocol

    system, path = file_system(folder), strip_protocol(folder).rstrip("/")

    def request() -> list[dict[str, Any]]:
        if is_deep:
            return list(system.find(folder, detail=True).values())
        return list(system.ls(folder, detail=True))

    try:
        infos = repeated(folder, request)
    except FileNotFoundError:
        return []
    # Some programs mark a folder by an empty file whose name is that of the folder, with a slash.
    found = [info for info in infos if not info["name"].endswith("/") or info["size"]]
    # Of a file, fsspec lists the file itself: there is nothing in it.
    found = [info for info in found if info["name"].rstrip("/") != path]
    # fsspec's names have no scheme, and begin with the bucket.
    return [(folder + info["name"][len(path) :].rstrip("/"), info) for info in found]


def unmatched_hint(url: str) -> str:
    """Say why ``url``, which matches no file, does not; "" if that is not known."""
    scheme, _, path = url.partition("://")
    bucket = f"{scheme}://{path.partition('/')[0]}"
    if is_http(url):
        return "the server has no such file"
    system = file_system(url)
    try:
        repeated(bucket, lambda: system.ls(bucket))
        is_folder = WILDCARD.search(path) is None and repeated(url, lambda: system.isdir(url))
        return f"it is a folder: try {url.rstrip('/')}/**/*.txt" if is_folder else ""
    except FileNotFoundError:
        return f"there is no {bucket}"
    except StorageError:
        # Who may read a file need not be allowed to list others.
        return ""
