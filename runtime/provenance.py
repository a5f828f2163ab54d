"""Provenance of a run: a JSON file for each of its starts in ``provenance/``. Imports no torch.

``attempt-00003.json`` has what belongs to one start. Configuration, software and uncommitted
changes are in files named by a hash of their contents, so starts that share them share a file.
"""

import hashlib
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tomli

from runtime.filesystem import atomic_write_text, make_folder, parse_object, read_file
from runtime.run_folder import unix_time

FOLDER = "provenance"
ATTEMPT_FILE = re.compile(r"attempt-(\d{5,9})\.json")
CONTENT_FILE = re.compile(r"(config|software|diff)-[0-9a-f]{16}\.(toml|diff)")
SHOWN = 5
# Variables that differ between starts without a change.
OF_ONE_START = re.compile(r"SLURM_\w+|TORCHELASTIC_\w+|TORCH_FR_DUMP_TEMP_FILE|MASTER_(ADDR|PORT)")


@dataclass(frozen=True, kw_only=True)
class Node:
    """Nodes that are alike: their hosts, and the number of ranks on each."""

    hosts: list[str]
    ranks: int
    machine: dict[str, str]
    """CPU, GPUs, driver, kernel and memory."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of a run. Secrets are masked."""

    number: int
    time: str
    """Of the start, as ``timestamp`` makes it."""
    command: list[str]
    working_directory: str
    version: str
    """Of Shardloom; "" if it is not installed."""
    commit: str
    """"" without a repository."""
    branch: str
    changed: list[str]
    """Files that differ from the commit."""
    untracked: list[str]
    diff: str
    """Name of the file with the changes; "" if there are none."""
    git_problem: str
    world_size: int
    nodes: list[Node]
    variables: dict[str, str]
    config: str
    """Name of the file with the resolved configuration."""
    software: str
    """Name of the file with Python, PyTorch, packages and hashes of the sources."""
    resumed_from: int | None
    """Step of the checkpoint; None without one, and until it is loaded."""


def write_content(folder: Path, name: str, suffix: str, text: str) -> str:
    """Write a file named by its content, unless it exists; return its name."""
    digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]
    path = folder / f"{name}-{digest}.{suffix}"
    if not path.is_file():
        make_folder(folder)
        atomic_write_text(path, text)
    return path.name


def write_attempt(folder: Path, attempt: Attempt) -> None:
    """Write or replace an attempt's file."""
    make_folder(folder)
    atomic_write_text(path_of(folder, attempt.number), json.dumps(asdict(attempt), indent=1) + "\n")


def path_of(folder: Path, number: int) -> Path:
    """File of an attempt."""
    return folder / f"attempt-{number:05d}.json"


def attempt_numbers(folder: Path) -> list[int]:
    """Numbers of the attempts with a file, ascending."""
    names = (ATTEMPT_FILE.fullmatch(path.name) for path in folder.glob("attempt-*"))
    return sorted(int(name[1]) for name in names if name)


def read_attempt(folder: Path, number: int) -> Attempt:
    """Read an attempt. Raises ``OSError`` or ``ValueError``, which names the file."""
    path = path_of(folder, number)
    record = parse_object(read_file(path))
    try:
        nodes = [_checked(Node, node) for node in record.pop("nodes")]
        return _checked(Attempt, record | {"nodes": nodes})
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ValueError(f"{path}: damaged") from None


def config_at(folder: Path, seconds: float) -> dict[str, dict[str, Any]] | None:
    """Tables of the configuration at ``seconds`` since the epoch; None if no attempt is known.

    A damaged attempt is skipped. Raises ``OSError`` or ``ValueError`` for a damaged configuration.
    """
    for number in reversed(attempt_numbers(folder)):
        try:
            attempt = read_attempt(folder, number)
        except (OSError, ValueError):
            continue
        began = unix_time(attempt.time)
        if began is not None and began <= seconds:
            return read_content(folder, attempt.config)
    return None


def _checked(kind: Any, record: Mapping[str, Any]) -> Any:
    """Construct ``kind``. Raises ``TypeError`` unless the fields have their types."""
    one = kind(**record)
    checks: dict[Any, Callable[[object], bool]] = {
        int: _is_count,
        str: _is_text,
        list[str]: partial(_are_of, _is_text),
        list[Node]: partial(_are_of, lambda value: isinstance(value, Node)),
        dict[str, str]: lambda v: isinstance(v, dict) and _are_of(_is_text, list(v.values())),
        int | None: lambda value: value is None or _is_count(value),
    }
    for name, annotation in kind.__annotations__.items():
        if not checks[annotation](getattr(one, name)):
            raise TypeError(name)
    return one


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 53


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_of(check: Any, values: object) -> bool:
    return isinstance(values, list) and all(map(check, values))


def read_content(folder: Path, name: str) -> dict[str, dict[str, Any]]:
    """Tables of an attempt's configuration or software. Raises ``OSError`` or ``ValueError``."""
    if not CONTENT_FILE.fullmatch(name):
        raise ValueError(f"{folder}: {name!r} is no file of an attempt")
    try:
        tables = tomli.loads(read_file(folder / name).decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{folder / name}: {error}") from None
    if not all(isinstance(table, dict) for table in tables.values()) or not tables:
        raise ValueError(f"{folder / name}: damaged")
    return tables


def describe(folder: Path, attempt: Attempt) -> list[str]:
    """Describe an attempt in a few lines. Raises ``OSError`` or ``ValueError``."""
    program = read_content(folder, attempt.software).get("program", {})
    names = ("Python", "PyTorch", "CUDA", "NCCL")
    versions = "  ".join(f"{k} {program[k]}" for k in names if program.get(k, "None") != "None")
    since = attempt.resumed_from
    resumed = "" if since is None else f", resumed from step {since}"
    code = f"shardloom {attempt.version}".strip() if attempt.version else "shardloom"
    return [
        f"attempt {attempt.number} at {attempt.time}{resumed}",
        f"  command {shlex.join(attempt.command)}  in {attempt.working_directory}",
        f"  {code}  {_code(attempt)}  {versions}",
        f"  {attempt.world_size} rank{'s' * (attempt.world_size != 1)} on {_nodes(attempt)}",
    ]


def _code(attempt: Attempt) -> str:
    if attempt.git_problem:
        return f"commit unknown ({attempt.git_problem})"
    if not attempt.commit:
        return "no commit"
    branch = f" ({attempt.branch})" if attempt.branch else ""
    changed = f", changed: {_some(attempt.changed)}" if attempt.changed else ", no changes"
    untracked = f", {len(attempt.untracked)} untracked" if attempt.untracked else ""
    return f"commit {attempt.commit[:12]}{branch}{changed}{untracked}"


def _nodes(attempt: Attempt) -> str:
    return "; ".join(
        f"{_some(node.hosts)} ({', '.join(v for v in node.machine.values() if v)})"
        for node in attempt.nodes
    )


def _some(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def changes(folder: Path, before: Attempt, after: Attempt) -> list[str]:
    """List what differs between two attempts, apart from their configurations.

    Raises ``OSError`` or ``ValueError`` if a file cannot be read.
    """
    values = {
        "commit": lambda a: f"{a.commit[:12]} {a.branch}".strip() or "none",
        "uncommitted changes": lambda a: a.diff or "none",
        "version": lambda a: a.version or "none",
        "ranks": lambda a: str(a.world_size),
        "hosts": lambda a: _some([host for node in a.nodes for host in node.hosts]),
        "machine": lambda a: "; ".join(", ".join(node.machine.values()) for node in a.nodes),
    }
    found = [
        f"{name}: {old} to {new}"
        for name, value in values.items()
        if (old := value(before)) != (new := value(after))
    ]
    if before.software != after.software:
        old, new = (read_content(folder, attempt.software) for attempt in (before, after))
        for table in ("program", "packages"):
            found += _differences("", old.get(table, {}), new.get(table, {}))
        sources = list(_differences("", old.get("sources", {}), new.get("sources", {})))
        if sources:
            found.append(f"sources: {_some([text.partition(':')[0] for text in sources])}")
    kept = (
        {name: value for name, value in one.variables.items() if not OF_ONE_START.fullmatch(name)}
        for one in (before, after)
    )
    return found + list(_differences("variable ", *kept))


def config_changes(folder: Path, before: Attempt, after: Attempt) -> list[str]:
    """List the keys of the resolved configuration that differ between two attempts.

    Raises ``OSError`` or ``ValueError`` if a file cannot be read.
    """
    if before.config == after.config:
        return []
    # What ends a Slurm job imports this module, but not pydantic, which is slow.
    from config.resume_compat import by_key, shown

    old, new = (by_key(read_content(folder, attempt.config)) for attempt in (before, after))
    texts = ({name: shown(value) for name, value in keys.items()} for keys in (old, new))
    return list(_differences("", *texts))


def _differences(prefix: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            yield f"{prefix}{name}: {old.get(name, 'absent')} to {new.get(name, 'absent')}"
