"""Save, publish, find and load checkpoints. Owns names, folders and proofs, never tensors.

A checkpoint is written to a temporary folder of its own, hashed as it is written, listed in a
manifest, fsynced and renamed to ``step-00000100``: visible means complete. The newest is the newest
that verifies. A thread writes; the collectives, and the renaming, are the trainer's own.
"""

import shutil
import uuid
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from checkpoint.manifest import NAME, read_manifest, sync_folder
from checkpoint.storage import Entry, Reader, read_index, write_parts
from checkpoint.store import (
    delete,
    problems_of,
    published,
    purge,
    read_state,
    seal,
    set_aside,
    sizes_of,
)
from config import ConfigError
from config.job_config import Checkpoint
from runtime.log import logger
from runtime.together import RankFailure, gather, on_first


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Save:
    """A save that was begun."""

    step: int
    scratch: Path
    values: dict[str, Any]
    written: Future[tuple[dict[str, Any], dict[str, Entry]]]


class Checkpointer:
    """``tensors`` go through DCP, any mesh to any mesh. ``values`` are JSON: what is saved is the
    union over ranks of their state dicts, and ranks that disagree on a key are an error.

    ``facts`` go into the manifest. ``check`` is called with the manifest of the checkpoint to
    resume from, and raises ``ConfigError`` if it is another run's. ``tell`` is called with each
    step published.
    """

    def __init__(
        self,
        folder: Path,
        config: Checkpoint,
        *,
        tensors: dict[str, Stateful],
        values: dict[str, Stateful],
        facts: dict[str, Any],
        check: Callable[[dict[str, Any]], None],
        tell: Callable[[int], None] = lambda step: None,
    ) -> None:
        self._folder, self._config = folder, config
        self._tensors, self._values = tensors, values
        self._facts, self._check, self._tell = facts, check, tell
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self.attempt: str = on_first(lambda: uuid.uuid4().hex)
        """Names this attempt, which lasts until the end, or until the next ``load_latest``."""
        self.newest = 0
        """Step of the newest checkpoint that this attempt loaded or published; 0: none."""
        self.parent: str | None = None
        """The attempt that saved what this one resumed from."""
        self._lineage: dict[str, Any] = {"run": self.attempt, "parent": None}
        self._verified: set[str] = set()
        self._save: Save | None = None
        self._items: list[WriteItem] | None = None
        self._host: dict[Any, torch.Tensor] = {}
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        # A thread of its own, for it may have to read, and hash, whole checkpoints to verify them.
        self._purger = ThreadPoolExecutor(max_workers=1, thread_name_prefix="retention")
        self._purged: Future[None] | None = None

    @property
    def is_writing(self) -> bool:
        """Whether this rank still writes what was begun."""
        return self._save is not None and not self._save.written.done()

    def is_due(self, step: int) -> bool:
        """Whether ``step`` is one to save."""
        return self._config.enable and step % self._config.interval == 0

    def is_overdue(self, step: int) -> bool:
        """Whether more steps would be lost now than may be lost."""
        most = self._config.max_unsaved_steps or 3 * self._config.interval
        return self._config.enable and step - self.newest > most

    def save(self, step: int, *, wait: bool) -> None:
        """Save the state of ``step``: on return it is published, or its failure is logged.

        With ``async_mode`` async, and not ``wait``, a later ``finish`` does that. A collective.
        """
        self.finish()
        self.begin(step)
        if wait or self._config.async_mode == "disabled":
            self.finish()

    def begin(self, step: int) -> None:
        """Start to save the state of ``step``; it may change as soon as this returns. A collective.

        With ``async_mode`` async, the state is copied to host memory and written meanwhile. Errors
        are logged by ``finish``, which must come before the next ``begin``.
        """
        assert self._save is None, "the last save was not finished"
        try:
            scratch = on_first(partial(self._open_scratch, step))
            state = {name: stateful.state_dict() for name, stateful in self._tensors.items()}
            planner = dcp.DefaultSavePlanner()
            planner.set_up_planner(state, is_coordinator=self._rank == 0)
            # What a rank writes is the same at every save; it may be nothing.
            self._items = _plan(planner) if self._items is None else self._items
            values = {name: deepcopy(s.state_dict()) for name, s in self._values.items()}
        except RankFailure as error:
            self._tell_failure(step, error)
            return
        path = scratch / f"rank-{self._rank:05d}.bin"
        written: Future[tuple[dict[str, Any], dict[str, Entry]]] = Future()
        try:
            resolve: Callable[[WriteItem], Any] = planner.resolve_data
            if self._config.async_mode == "async":
                resolve = self._stage(planner, self._items)
            written = self._writer.submit(write_parts, path, self._items, resolve)
        except Exception as error:  # On this rank alone: the others hear of it in ``finish``.
            written.set_exception(error)
        self._save = Save(step, scratch, values, written)
        if self._config.async_mode == "disabled":
            written.exception()

    def finish(self) -> Path | None:
        """Wait for the save that was begun, publish it and return its folder. A collective.

        None: nothing was begun, or it failed, which is logged; older checkpoints are untouched.
        """
        save, self._save = self._save, None
        if save is None:
            return None
        try:
            parts = gather(lambda: (save.values, save.written.result()))
            folder = on_first(partial(self._publish, save, parts))
        except RankFailure as error:
            self._tell_failure(save.step, error)
            if self._rank == 0:
                shutil.rmtree(save.scratch, ignore_errors=True)
            return None
        self.newest = save.step
        self._verified.add(folder.name)
        self._tell(save.step)
        logger.info("saved %s", folder)
        if self._rank == 0 and self._config.keep_latest_k:
            self._purged = self._purger.submit(self._purge)
        return folder

    def _purge(self) -> None:
        keep, every = self._config.keep_latest_k, self._config.keep_every
        try:
            purge(self._folder, keep=keep, keep_every=every, verified=self._verified)
        except OSError as error:
            logger.warning("older checkpoints were not deleted: %s", error)

    def close(self) -> None:
        """Wait for both threads: one may be deleting old checkpoints."""
        self._writer.shutdown()
        self._purger.shutdown()

    def load_latest(self, *, leave: Collection[str] = ()) -> int | None:
        """Restore the newest checkpoint that verifies; return its step, None if there is none.

        ``leave``: values that stay as they are. Raises ``ConfigError`` if the checkpoint is not of
        this run, or if there are checkpoints and none verifies. A collective.
        """
        if not self._config.enable:
            return None
        assert self._save is None, "a save is not finished"
        if self._purged is not None:
            self._purged.result()
        damaged: dict[Path, list[str]] = {}
        for folder in on_first(partial(published, self._folder)):
            problems = _verify(folder)
            if problems:
                damaged[folder] = problems
                continue
            manifest = on_first(partial(read_manifest, folder))
            self._check(manifest)
            self._load(folder, manifest, self._tensors)
            self._load_values(folder, leave)
            # Only now: where nothing verifies, everything stays in its place.
            for bad, found in damaged.items():
                aside = on_first(partial(set_aside, bad, "corrupt"))
                logger.warning("checkpoint set aside as %s: %s", aside, "; ".join(found))
            self._verified.add(folder.name)
            self._begin_lineage(manifest, run=manifest["run"])
            self.parent, self.attempt = manifest["attempt"], on_first(lambda: uuid.uuid4().hex)
            self.newest = manifest["step"]
            return self.newest
        if damaged:
            found = [problem for problems in damaged.values() for problem in problems]
            text = "no checkpoint verifies, so nothing was loaded or changed; start another name"
            raise ConfigError([f"job.name: {text}: {'; '.join(found)}"])
        return None

    def load_initial(self, model: Stateful) -> None:
        """Take the weights from ``initial_load_path``; ``ConfigError`` if it does not verify."""
        folder = Path(self._config.initial_load_path)
        if not on_first((folder / NAME).exists):
            text = f"{folder} has no {NAME}, as checkpoints have, nor Hugging Face's config.json"
            raise ConfigError([f"checkpoint.initial_load_path: {text}"])
        problems = _verify(folder)
        if problems:
            raise ConfigError([f"checkpoint.initial_load_path: {problem}" for problem in problems])
        manifest = on_first(partial(read_manifest, folder))
        self._load(folder, manifest, {"model": model})
        self._begin_lineage(manifest, run=self.attempt)

    def _begin_lineage(self, manifest: dict[str, Any], *, run: str) -> None:
        parent = {key: manifest[key] for key in ("run", "attempt", "step")}
        self._lineage = {"run": run, "parent": parent}

    def _open_scratch(self, step: int) -> Path:
        """A new folder to write to. What earlier attempts left behind goes first: it takes room."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        delete([*self._folder.glob(".tmp-step-*"), *self._folder.glob(".trash-*")])
        scratch = self._folder / f".tmp-step-{step:08d}-{uuid.uuid4().hex[:8]}"
        scratch.mkdir(mode=0o700)
        return scratch

    def _stage(
        self, planner: dcp.DefaultSavePlanner, items: list[WriteItem]
    ) -> Callable[[WriteItem], torch.Tensor]:
        """Copy this rank's items to host memory, which is kept for the next save."""
        for item in items:
            tensor: Any = planner.resolve_data(item)
            is_cuda = tensor.device.type == "cuda"
            if item.index not in self._host:
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_cuda)
                self._host[item.index] = host
            self._host[item.index].copy_(tensor.detach(), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return lambda item: self._host[item.index]

    def _publish(self, save: Save, parts: list[Any]) -> Path:
        state: dict[str, Any] = reduce(merge, (values for values, _ in parts), {})
        written = {f"rank-{rank:05d}.bin": part for rank, (_, part) in enumerate(parts)}
        facts = {"step": save.step, "world_size": self._world_size, "attempt": self.attempt}
        seal(save.scratch, written, state=state, facts={**facts, **self._lineage, **self._facts})
        sync_folder(save.scratch)
        folder = self._folder / f"step-{save.step:08d}"
        if folder.exists():
            # The same step again, after a failed verification or an extended run: never overwrite.
            set_aside(folder, "replaced")
        save.scratch.rename(folder)
        sync_folder(self._folder)
        return folder

    def _tell_failure(self, step: int, error: Exception) -> None:
        text = "ALARM: step %d was not saved (newest checkpoint: %s): %s"
        logger.error(text, step, self.newest or "none", error)

    def _load(self, folder: Path, manifest: dict[str, Any], tensors: dict[str, Stateful]) -> None:
        state = {name: stateful.state_dict() for name, stateful in tensors.items()}
        wanted = {f"{name}.{key}": t for name, part in state.items() for key, t in part.items()}
        index: dict[str, Entry] = {}

        def differences() -> tuple[list[str], set[str]]:
            index.update(read_index(folder, sizes_of(manifest)))
            ours = {fqn for fqn in index if fqn.partition(".")[0] in tensors}
            # Initial weights may come in another dtype; a run that resumes must keep its own.
            has_dtype = tensors is self._tensors
            return _differences(index, wanted, has_dtype=has_dtype), ours - wanted.keys()

        answers = gather(differences)
        problems = on_first(partial(_merge_differences, answers))
        if problems:
            text = f"{folder} is of another model: {'; '.join(problems)}"
            raise ConfigError([f"model.name, flavor or vocab_size: {text}"])
        dcp.load(state, storage_reader=Reader(folder, index))
        for name, stateful in tensors.items():
            stateful.load_state_dict(state[name])

    def _load_values(self, folder: Path, leave: Collection[str]) -> None:
        state = on_first(partial(read_state, folder))
        for name in self._values.keys() - leave:
            self._values[name].load_state_dict(state[name])


def merge(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The union of two nested dicts; raise ``ValueError`` where they disagree."""
    union = dict(first)
    for key, value in second.items():
        if isinstance(value, dict) and isinstance(union.get(key, {}), dict):
            union[key] = merge(union.get(key, {}), value)
        elif union.setdefault(key, value) != value:
            raise ValueError(f"ranks disagree on the state {key!r}: {union[key]!r} and {value!r}")
    return union


def _plan(planner: dcp.DefaultSavePlanner) -> list[WriteItem]:
    """What this rank is to write; what several ranks hold, one of them writes. A collective."""
    plans = gather(lambda: _tensors_only(planner.create_local_plan()))
    shares: list[SavePlan] = []
    on_first(lambda: shares.extend(planner.create_global_plan(plans)[0]))
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, shares or None)
    return planner.finish_plan(mine[0]).items


def _tensors_only(plan: SavePlan) -> SavePlan:
    others = [item.index.fqn for item in plan.items if item.type == WriteItemType.BYTE_IO]
    if others:
        raise ValueError(f"not a tensor, so it could not be loaded: {others[0]}")
    return plan


def _verify(folder: Path) -> list[str]:
    """What is wrong with a checkpoint. A collective: each rank hashes a share of the files."""
    found = gather(partial(problems_of, folder, dist.get_rank(), dist.get_world_size()))
    return on_first(lambda: sorted({problem for problems in found for problem in problems}))


def _differences(
    index: dict[str, Entry], wanted: dict[str, torch.Tensor], *, has_dtype: bool
) -> list[str]:
    found = []
    for fqn, tensor in wanted.items():
        want = (str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        if fqn not in index:
            found.append(f"it has no {fqn}")
            continue
        have = (index[fqn].dtype, index[fqn].shape)
        if have[not has_dtype :] != want[not has_dtype :]:
            found.append(f"its {fqn} is {have[0]} {have[1]}, not {want[0]} {want[1]}")
    return found


def _merge_differences(answers: list[tuple[list[str], set[str]]]) -> list[str]:
    """The first of each kind. Left over is what no rank wants, as stages want different tensors."""
    left_over = set.intersection(*(unread for _, unread in answers))
    found = sorted({problem for problems, _ in answers for problem in problems})
    return found[:1] + [f"it also has {fqn}" for fqn in sorted(left_over)[:1]]
