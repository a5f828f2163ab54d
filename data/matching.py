"""Files that a glob matches: each once by identity, however many names and links lead to it."""

import os
import re
import stat
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path

from config.paths import is_url
from data import remote_matching
from data.files import TOKEN_INDEX_FILE, WILDCARD, path_error, relative_names
from data.remote_matching import match_urls, name_matches
from data.storage import DataPath, Facts, RemoteFile
from runtime.log import logger

_SOURCES = "give each path its own [[data.sources]]"
_SEPARATORS = {",": "a comma", ";": "a semicolon", ":": "a colon", " ": "a space"}

# Device and inode; the path where a file system has no inodes; a URL.
FileId = Hashable


def matching_files(
    pattern: str, owners: Mapping[FileId, str], label: str
) -> list[tuple[DataPath, str]]:
    """(path, name) of the files that the glob matches, sorted; ``**`` also recurses into links.

    Names are relative to the glob's fixed part. A file that several names lead to is returned once,
    by a name without links if it has one. ``owners``, ``label``: as in ``without_owned``. Raises
    ``ValueError`` if no file is left.
    """
    matches: dict[FileId, list[tuple[DataPath, str]]] = {}
    for path, name in relative_names(pattern, match_paths(pattern)):
        status = file_status(path)
        if stat.S_ISREG(status.st_mode):
            matches.setdefault(identity(path, status), []).append((path, name))
        elif not stat.S_ISDIR(status.st_mode):
            raise ValueError(f"data.path: {path} is neither a file nor a folder")
    if not matches:
        text = f"data.path: no file matches {pattern!r}"
        hint = unmatched_hint(pattern)
        if (Path(pattern) / TOKEN_INDEX_FILE).exists():
            hint = 'it has prepared tokens, which data.source = "tokens" reads'
        elif Path(pattern).is_dir():
            hint = f"it is a folder: try {pattern.rstrip('/')}/**/*.txt"
        raise ValueError(text + (f"; {hint}" if hint else ""))
    return without_owned(sorted(once_each(matches, pattern)), owners, label)


def once_each(
    matches: Mapping[FileId, list[tuple[DataPath, str]]], pattern: str
) -> list[tuple[DataPath, str]]:
    """(path, name) of each file, of all by which ``pattern`` leads to it."""
    n_links = sum(map(len, matches.values())) - len(matches)
    if n_links:
        logger.info("data: %s: skipped %d links to files that it has", pattern, n_links)
    return [_without_links(found) for found in matches.values()]


def without_owned(
    files: list[tuple[DataPath, str]], owners: Mapping[FileId, str], label: str
) -> list[tuple[DataPath, str]]:
    """Those of ``files``, of the source ``label``, that no other source has.

    ``owners``: labels of other sources by their files. Raises ``ValueError`` if none is left.
    """
    if not owners:
        return files
    owner_of = {path: owners.get(file_id(path)) for path, _ in files}
    taken = Counter(owner for owner in owner_of.values() if owner is not None)
    if taken.total() == len(files):
        text = f"{', '.join(taken)} has all its files, and a file of two sources is the first's"
        raise ValueError(f"data.path: {text}")
    for owner, count in taken.items():
        logger.warning("data: %s: skipped %d files that %s has", label, count, owner)
    return [file for file in files if owner_of[file[0]] is None]


def match_paths(pattern: str, *, folder_file: str = "") -> Sequence[DataPath]:
    """Sorted paths that a glob matches. Unlike ``glob.glob``, ``**`` visits each folder once.

    A path with the very name of the pattern is its only match. Of remote folders only those match
    that have a file named ``folder_file``. Raises ``ValueError`` for a folder that cannot be read
    and a link to nothing, which ``glob.glob`` would omit.
    """
    if is_url(pattern):
        return match_urls(pattern, folder_file=folder_file)
    if os.path.isfile(pattern):
        return [Path(pattern)]
    parts = [part for part in pattern.split("/") if part]
    if not parts or "\0" in pattern:
        return []
    try:
        return sorted({*map(Path, _expand("/" if pattern.startswith("/") else "", parts))})
    except OSError as error:
        raise path_error(error.filename, error) from None


def unmatched_hint(pattern: str) -> str:
    """Say what in ``pattern`` means nothing here, and what to write instead; "" if nothing does.

    Only for a pattern that matches no file: the name of a file may have any character.
    """
    if pattern != pattern.strip():
        return "it begins or ends with white space"
    if len(pattern) > 1 and pattern[0] == pattern[-1] and pattern[0] in "'\"":
        return "the quotation marks are part of it: remove them"
    if re.search(r"\{[^{}]*(,|\.\.)[^{}]*\}", pattern):
        return f"braces are not expanded: {_SOURCES}, or use * and [ab], which match characters"
    for separator, name in _SEPARATORS.items():
        parts = pattern.split(separator)
        # A separator inside of one path is not the reason: each part must look like a path.
        if len(parts) > 1 and all(re.search(r"[./*]", part) for part in parts if part.strip()):
            return f"{name} separates nothing: {_SOURCES}"
    if is_url(pattern):
        return remote_matching.unmatched_hint(pattern)
    if "\\" in pattern:
        return "folders are separated by /, not by a backslash"
    if pattern.endswith("/"):
        return "it ends with /, which matches only folders"
    return ""


def _expand(folder: str, parts: list[str]) -> Iterator[str]:
    if not parts:
        yield folder
        return
    part, *rest = parts
    if part == "**":
        for found in _folders(folder):
            yield from _expand(found, rest or ["*"])
    elif WILDCARD.search(part):
        for name in _names(folder):
            if name_matches(name, part):
                yield from _expand(os.path.join(folder, name), rest)
    elif _exists(path := os.path.join(folder, part)):
        yield from _expand(path, rest)


def _folders(folder: str) -> Iterator[str]:
    """``folder`` and all below it, each once. Links are followed last, so that real names win."""
    seen: set[FileId] = set()
    links = [folder] if _is_folder(folder) else []
    while links:
        pending, links = sorted(links, reverse=True), []
        while pending:
            current = pending.pop()
            folder_id = identity(Path(current), os.stat(current or "."))
            if folder_id in seen:
                continue
            seen.add(folder_id)
            yield current
            paths = [os.path.join(current, n) for n in _names(current) if not n.startswith(".")]
            below = [path for path in paths if _is_folder(path)]
            links += filter(os.path.islink, below)
            pending += reversed([path for path in below if not os.path.islink(path)])


def _names(folder: str) -> list[str]:
    return sorted(os.listdir(folder or ".")) if _is_folder(folder) else []


# Unlike those of os.path, these raise ``OSError`` where the file system does not answer.
def _exists(path: str) -> bool:
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _is_folder(path: str) -> bool:
    """True for a folder, through links. Raises ``ValueError`` for a link to nothing."""
    try:
        return stat.S_ISDIR(os.stat(path or ".").st_mode)
    except (FileNotFoundError, NotADirectoryError):
        if os.path.islink(path):
            raise ValueError(f"data.path: {path} is a link to nothing") from None
        return False


def file_status(path: DataPath) -> os.stat_result | Facts:
    """Status of the file at ``path``; errors as of ``path_error``."""
    if isinstance(path, RemoteFile):
        return path.stat()
    try:
        return path.stat()
    except OSError as error:
        if isinstance(error, FileNotFoundError) and path.is_symlink():
            raise ValueError(f"data.path: {path} is a link to nothing") from None
        raise path_error(path, error) from None


def file_id(path: DataPath) -> FileId:
    """Identity of the file at ``path``, however many names lead to it."""
    return identity(path, file_status(path))


def identity(path: DataPath, status: os.stat_result | Facts) -> FileId:
    """As ``file_id``, of a known status."""
    return (status.st_dev, status.st_ino) if status.st_ino else os.path.realpath(str(path))


def _without_links(found: list[tuple[DataPath, str]]) -> tuple[DataPath, str]:
    """The one of a file's names that has no link in it, or the first."""
    return found[0] if len(found) == 1 else min(found, key=_link_first)


def _link_first(match: tuple[DataPath, str]) -> tuple[bool, tuple[Path, str]]:
    """Sort key by which names without links come first; the glob's fixed part may be a link."""
    path, name = match
    assert isinstance(path, Path), "a remote file has one name"
    root = os.path.realpath(path.parents[name.count("/")])
    return os.path.realpath(path) != os.path.join(root, name), (path, name)
