"""Save, publish, find and load checkpoints. Owns names, folders and proofs, never tensors.

A checkpoint is written to a temporary folder of its own, hashed, listed in a manifest, fsynced and
renamed to ``step-00000100``: visible means complete. The newest is the newest that verifies.
"""

import json
import re
import shutil
import uuid
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from checkpoint.manifest import (
    describe_file,
    faults,
    read_manifest,
    sync_folder,
    write_durably,
    write_manifest,
)
from checkpoint.reader import METADATA_FILE, Reader, unlisted
from config import ConfigError
from config.job_config import Checkpoint
from runtime.log import logger

STATE_FILE = "state.json"
T = TypeVar("T")


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Checkpointer:
    """``tensors`` go through DCP, any mesh to any mesh. ``values`` are JSON: what is saved is the
    union over ranks of their state dicts, and ranks that disagree on a key are an error."""

    def __init__(
        self,
        folder: Path,
        config: Checkpoint,
        *,
        tensors: dict[str, Stateful],
        values: dict[str, Stateful],
    ) -> None:
        self._folder, self._config = folder, config
        self._tensors, self._values = tensors, values
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()

    def save(self, step: int) -> Path:
        """Write the state of ``step`` and publish it; return its folder. A collective."""
        published = self._folder / f"step-{step:08d}"
        scratch = self._on_first(partial(self._open_scratch, published.name))
        # One writer thread: with more, DCP loses write errors (pytorch#191391).
        writer = dcp.FileSystemWriter(scratch, thread_count=1, sync_files=True)
        state = {name: stateful.state_dict() for name, stateful in self._tensors.items()}
        dcp.save(state, storage_writer=writer)
        parts = self._on_all(partial(self._describe_part, scratch))
        self._on_first(partial(self._publish, scratch, published, step, parts))
        return published

    def load_latest(self) -> int | None:
        """Restore the newest checkpoint that verifies; return its step, None if there is none."""
        if not self._config.enable:
            return None
        for folder in self._on_first(self._published):
            problems = self._verify(folder)
            if not problems:
                self._load(folder, self._tensors)
                self._load_values(folder)
                return _step(folder)
            self._set_aside(folder, problems)
        return None

    def load_initial(self, model: Stateful) -> None:
        """Take the weights from ``initial_load_path``; ``ConfigError`` if it does not verify."""
        folder = Path(self._config.initial_load_path)
        problems = self._verify(folder)
        if problems:
            raise ConfigError([f"checkpoint.initial_load_path: {problem}" for problem in problems])
        self._load(folder, {"model": model})

    def _open_scratch(self, name: str) -> Path:
        """A new folder to write to. What earlier attempts left behind goes first: it takes room."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._delete([*self._folder.glob(".tmp-step-*"), *self._folder.glob(".trash-*")])
        scratch = self._folder / f".tmp-{name}-{uuid.uuid4().hex[:8]}"
        scratch.mkdir(mode=0o700)
        return scratch

    def _describe_part(self, scratch: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """This rank's values, and its files as the manifest has them."""
        values = {name: stateful.state_dict() for name, stateful in self._values.items()}
        mine = sorted(path for path in scratch.iterdir() if self._is_mine(path))
        return values, {path.name: describe_file(path) for path in mine}

    def _publish(self, scratch: Path, published: Path, step: int, parts: list[Any]) -> None:
        state: dict[str, Any] = {}
        files: dict[str, Any] = {}
        for values, described in parts:
            state = merge(state, values)
            files |= described
        write_durably(scratch / STATE_FILE, json.dumps(state).encode())
        files[STATE_FILE] = describe_file(scratch / STATE_FILE)
        problems = unlisted(scratch, files)
        if problems:
            raise ValueError(f"not published, could not be loaded: {'; '.join(problems)}")
        write_manifest(scratch, files, {"step": step, "world_size": self._world_size})
        sync_folder(scratch)
        if published.exists():
            # The same step again, after a failed verification or an extended run: never overwrite.
            published.rename(self._folder / f"replaced-{published.name}-{uuid.uuid4().hex[:8]}")
        scratch.rename(published)
        sync_folder(self._folder)
        if self._config.keep_latest_k:
            self._delete(self._published()[self._config.keep_latest_k :])

    def _delete(self, folders: Iterable[Path]) -> None:
        for folder in folders:
            # Renamed first, so that a half-deleted folder is never a candidate.
            trash = self._folder / f".trash-{uuid.uuid4().hex}"
            folder.rename(trash)
            # What stays, as files that are open do on NFS, the next save tries again.
            shutil.rmtree(trash, ignore_errors=True)

    def _published(self) -> list[Path]:
        """Published checkpoints, the newest first."""
        found = [p for p in self._folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", p.name)]
        return sorted(found, key=_step, reverse=True)

    def _verify(self, folder: Path) -> list[str]:
        """What is wrong with a checkpoint. A collective: each rank hashes a share of the files."""
        found = self._on_all(partial(self._faults_of_share, folder))
        return sorted({problem for problems in found for problem in problems})

    def _faults_of_share(self, folder: Path) -> list[str]:
        try:
            manifest = read_manifest(folder)
        except ValueError as error:
            return [str(error)]
        files = {METADATA_FILE: None, STATE_FILE: None} | manifest["files"]
        share = sorted(files)[self._rank :: self._world_size]
        problems = faults(folder, files, share)
        # Read only now that its hash is right; it says which of the files will be read.
        if METADATA_FILE in share and not problems:
            problems = unlisted(folder, files)
        return problems

    def _set_aside(self, folder: Path, problems: list[str]) -> None:
        name = f"corrupt-{folder.name}-{uuid.uuid4().hex[:8]}"
        aside = self._on_first(lambda: folder.rename(folder.with_name(name)))
        logger.warning("checkpoint set aside as %s: %s", aside, "; ".join(problems))

    def _load(self, folder: Path, tensors: dict[str, Stateful]) -> None:
        state = {name: stateful.state_dict() for name, stateful in tensors.items()}
        reader = Reader(folder)
        wanted = {f"{name}.{key}" for name, part in state.items() for key in part}

        def unwanted() -> set[str]:
            saved = reader.read_metadata().state_dict_metadata
            return {key for key in saved if key.partition(".")[0] in tensors} - wanted

        # DCP raises for what is missing or of another shape, but ignores what is left over.
        unread = set.intersection(*self._on_all(unwanted))
        if unread:
            text = f"{folder} is of another model: it also has {min(unread)}"
            raise ConfigError([f"model.name or model.flavor: {text}"])
        dcp.load(state, storage_reader=reader)
        for name, stateful in tensors.items():
            stateful.load_state_dict(state[name])

    def _load_values(self, folder: Path) -> None:
        state = self._on_first(lambda: json.loads((folder / STATE_FILE).read_bytes()))
        for name, stateful in self._values.items():
            stateful.load_state_dict(state[name])

    def _is_mine(self, path: Path) -> bool:
        """DCP's data files are named after their rank; what belongs to all is rank 0's."""
        named = re.match(r"__(\d+)_", path.name)
        return int(named.group(1)) == self._rank if named else self._rank == 0

    def _on_first(self, act: Callable[[], T]) -> T:
        """Let rank 0 act; what it returns, on every rank."""
        return cast(T, self._on_all(lambda: act() if self._rank == 0 else None)[0])

    def _on_all(self, act: Callable[[], T]) -> list[T]:
        """What ``act`` returns on each rank. If one raises, all raise: none may wait."""
        result: T | None = None
        cause: Exception | None = None
        try:
            result = act()
        except Exception as error:
            cause = error
        gathered: list[Any] = [None] * self._world_size
        dist.all_gather_object(gathered, (result, cause and f"{type(cause).__name__}: {cause}"))
        failures = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(gathered) if text]
        if failures:
            raise RuntimeError("checkpoint: " + "; ".join(failures)) from cause
        return [answer for answer, _ in gathered]


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def merge(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The union of two nested dicts; raise ``ValueError`` where they disagree."""
    union = dict(first)
    for key, value in second.items():
        if isinstance(value, dict) and isinstance(union.get(key, {}), dict):
            union[key] = merge(union.get(key, {}), value)
        elif union.setdefault(key, value) != value:
            raise ValueError(f"ranks disagree on the state {key!r}: {union[key]!r} and {value!r}")
    return union
