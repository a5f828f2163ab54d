"""Save, publish, find and load checkpoints. Owns names, folders and proofs, never tensors.

A checkpoint is written to a temporary folder of its own, hashed, listed in a manifest, fsynced and
renamed to ``step-00000100``: visible means complete. The newest is the newest that verifies.
"""

import json
import re
import shutil
import uuid
from pathlib import Path
from typing import Any, Protocol

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
from config.job_config import Checkpoint
from runtime.log import logger

STATE_FILE = "state.json"


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

    def is_due(self, step: int) -> bool:
        return self._config.enable and step % self._config.interval == 0

    def save(self, step: int) -> Path:
        """Write the state of ``step`` and publish it; return its folder. A collective."""
        published = self._folder / f"step-{step:08d}"
        attempt = self._agree(uuid.uuid4().hex[:8])
        scratch = self._folder / f".tmp-step-{step:08d}-{attempt}"
        scratch.mkdir(parents=True, exist_ok=True)
        # One writer thread: with more, DCP loses write errors (pytorch#191391).
        writer = dcp.FileSystemWriter(scratch, thread_count=1, sync_files=True)
        state = {name: stateful.state_dict() for name, stateful in self._tensors.items()}
        dcp.save(state, storage_writer=writer)
        values = {name: stateful.state_dict() for name, stateful in self._values.items()}
        mine = sorted(path for path in scratch.iterdir() if self._is_mine(path))
        described = {path.name: describe_file(path) for path in mine}
        gathered: list[Any] = [None] * self._world_size
        dist.all_gather_object(gathered, (values, described))
        if self._rank == 0:
            self._publish(scratch, published, step, gathered)
        dist.barrier()
        return published

    def load_latest(self) -> int | None:
        """Restore the newest checkpoint that verifies; return its step, None if there is none."""
        if not self._config.enable:
            return None
        for folder in self._agree(self._published()):
            problems = self._verify(folder)
            if not problems:
                self._load(folder, self._tensors)
                self._load_values(folder)
                return int(folder.name.removeprefix("step-"))
            self._set_aside(folder, problems)
        return None

    def load_initial(self, model: Stateful) -> None:
        """Take the weights from ``initial_load_path``; ``ValueError`` if it does not verify."""
        folder = Path(self._config.initial_load_path)
        problems = self._verify(folder)
        if problems:
            raise ValueError(f"checkpoint.initial_load_path: {'; '.join(problems)}")
        self._load(folder, {"model": model})

    def _publish(self, scratch: Path, published: Path, step: int, gathered: list[Any]) -> None:
        state: dict[str, Any] = {}
        files: dict[str, Any] = {}
        for values, described in gathered:
            state = merge(state, values)
            files |= described
        write_durably(scratch / STATE_FILE, json.dumps(state).encode())
        files[STATE_FILE] = describe_file(scratch / STATE_FILE)
        write_manifest(scratch, files, {"step": step, "world_size": self._world_size})
        sync_folder(scratch)
        if published.exists():
            # The same step again, after a failed verification or an extended run: never overwrite.
            published.rename(self._folder / f"replaced-{published.name}-{uuid.uuid4().hex[:8]}")
        scratch.rename(published)
        sync_folder(self._folder)
        self._purge()

    def _purge(self) -> None:
        """Delete all but the newest ``keep_latest_k`` published checkpoints, and torn ones."""
        keep = self._config.keep_latest_k
        old = self._published()[keep:] if keep else []
        for folder in [*old, *self._folder.glob(".tmp-step-*"), *self._folder.glob(".trash-*")]:
            # Renamed first, so that a half-deleted folder is never a candidate.
            trash = self._folder / f".trash-{uuid.uuid4().hex}"
            folder.rename(trash)
            shutil.rmtree(trash)

    def _published(self) -> list[Path]:
        """Published checkpoints, the newest first."""
        found = [p for p in self._folder.glob("step-*") if re.fullmatch(r"step-\d{8}", p.name)]
        return sorted(found, reverse=True)

    def _verify(self, folder: Path) -> list[str]:
        """What is wrong with a checkpoint. A collective: each rank hashes a share of the files."""
        try:
            manifest = read_manifest(folder)
            names = sorted(manifest["files"])[self._rank :: self._world_size]
            problems = faults(folder, manifest, names)
        except ValueError as error:
            problems = [str(error)]
        gathered: list[Any] = [None] * self._world_size
        dist.all_gather_object(gathered, problems)
        return sorted({problem for found in gathered for problem in found})

    def _set_aside(self, folder: Path, problems: list[str]) -> None:
        aside = folder.with_name(f"corrupt-{folder.name}-{self._agree(uuid.uuid4().hex[:8])}")
        logger.warning("checkpoint set aside as %s: %s", aside, "; ".join(problems))
        if self._rank == 0:
            folder.rename(aside)
        dist.barrier()

    def _load(self, folder: Path, tensors: dict[str, Stateful]) -> None:
        state = {name: stateful.state_dict() for name, stateful in tensors.items()}
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder))
        for name, stateful in tensors.items():
            stateful.load_state_dict(state[name])

    def _load_values(self, folder: Path) -> None:
        state = json.loads((folder / STATE_FILE).read_bytes())
        for name, stateful in self._values.items():
            stateful.load_state_dict(state[name])

    def _is_mine(self, path: Path) -> bool:
        """DCP's data files are named after their rank; what belongs to all is rank 0's."""
        named = re.match(r"__(\d+)_", path.name)
        return int(named.group(1)) == self._rank if named else self._rank == 0

    def _agree(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]


def merge(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The union of two nested dicts; raise ``ValueError`` where they disagree."""
    union = dict(first)
    for key, value in second.items():
        if isinstance(value, dict) and isinstance(union.get(key, {}), dict):
            union[key] = merge(union.get(key, {}), value)
        elif union.setdefault(key, value) != value:
            raise ValueError(f"ranks disagree on the state {key!r}: {union[key]!r} and {value!r}")
    return union
