"""Save, commit, verify and load checkpoints.

A checkpoint is written to a temporary folder, hashed while it is written, listed in a manifest,
fsynced and renamed to ``step-00000100``: visible means complete. Loading takes the newest that
verifies. A thread writes; the main thread runs the collectives and the rename.
"""

import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import WriteItem

from checkpoint.checkpoint_dir import (
    STATE_FILE,
    delete,
    purge,
    quarantine,
    read_state,
    verify_checkpoint,
    write_metadata,
)
from checkpoint.host_buffers import allocate_like
from checkpoint.manifest import MANIFEST_FILE, manifest_digest, read_manifest, sizes_of
from checkpoint.tensor_files import load_on_mesh, write_tensor_file
from checkpoint.tensor_index import TensorRecord, read_index, write_index
from checkpoint.write_plan import WritePlan, plan_writes
from config import ConfigError
from config.job_config import Checkpoint
from runtime.filesystem import fsync_folder, make_folder
from runtime.log import logger
from runtime.object_collectives import (
    RankFailure,
    call_beyond_timeout,
    gather_to_rank0,
    raise_if_unequal,
    run_on_rank0,
)
from runtime.run_folder import list_checkpoints, step_of


class Stateful(Protocol):
    """Protocol of ``torch.distributed.checkpoint.stateful.Stateful``."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class TensorState(Stateful, Protocol):
    """State of tensors, which are loaded in place."""

    def load_targets(self, saved: Collection[str]) -> dict[str, Any]:
        """Return the tensors to load, of a checkpoint whose keys are ``saved``."""


class RetentionStopped(Exception):
    """The retention thread need not verify older checkpoints any more."""


@dataclass(frozen=True)
class PendingSave:
    """A save between ``begin`` and ``finish``."""

    step: int
    scratch: Path
    json_state: dict[str, Any]
    written: Future[dict[str, dict[str, Any]]]
    """Size and hash of each file that this rank writes."""
    began: float
    """``time.monotonic()``."""


class Checkpointer:
    """Checkpoints of one run. Construction is collective, as are the methods that say so.

    ``tensor_states`` are saved by DCP and load on any mesh. Of ``json_states``, the union of all
    ranks' state dicts is saved as JSON, and a save fails if ranks disagree on a key.

    ``metadata`` goes into the manifest. ``validate`` is called with the manifest of the checkpoint
    to resume from, and raises ``ConfigError`` if it belongs to another run. ``before_commit`` is
    called on rank 0, and raises an error if the folder is another process's by now: ``OSError``
    fails the save, ``ConfigError`` ends the run. ``on_saved`` is called with the step of each
    committed checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        config: Checkpoint,
        *,
        tensor_states: dict[str, TensorState],
        json_states: dict[str, Stateful],
        metadata: dict[str, Any],
        validate: Callable[[dict[str, Any]], None],
        before_commit: Callable[[], None] = lambda: None,
        on_saved: Callable[[int], None] = lambda step: None,
    ) -> None:
        self._folder, self._config = folder, config
        self._tensor_states, self._json_states = tensor_states, json_states
        self._metadata, self._validate = metadata, validate
        self._before_commit, self._on_saved = before_commit, on_saved
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self.attempt: str = run_on_rank0(lambda: uuid.uuid4().hex)
        """ID of this attempt; ``load_latest`` begins another one."""
        self.newest_step = 0
        """Step of the newest checkpoint that this attempt loaded or saved; 0: none."""
        self.parent_attempt: str | None = None
        """ID of the attempt that this one resumed from."""
        self._lineage: dict[str, Any] = {"run": self.attempt, "parent": None}
        """Of the manifest. run: ID of the run's first attempt. parent: run, attempt and step of the
        checkpoint that this attempt loaded; None without one."""
        self._verified: set[str] = set()
        self._pending: PendingSave | None = None
        self._plan: WritePlan | None = None
        self._planned: set[str] | None = None
        """Names of the tensors that this rank had when writes were planned."""
        self._host_buffers: dict[Any, torch.Tensor] = {}
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        # A separate thread, because verifying reads and hashes whole checkpoints.
        self._purger = ThreadPoolExecutor(max_workers=1, thread_name_prefix="retention")
        self._purged: Future[None] | None = None
        self._is_retention_stopped = threading.Event()

    @property
    def is_writing(self) -> bool:
        """True if this rank is still writing the pending save."""
        return self._pending is not None and not self._pending.written.done()

    def is_due(self, step: int) -> bool:
        """True if a periodic checkpoint is due at ``step``; the last step is saved by the loop."""
        return self._config.enable and step % self._config.interval == 0

    def is_overdue(self, step: int) -> bool:
        """True if more steps than ``max_unsaved_steps`` have passed since the last checkpoint."""
        limit = self._config.max_unsaved_steps or 3 * self._config.interval
        return self._config.enable and step - self.newest_step > limit

    def save(self, step: int, *, wait: bool) -> None:
        """Save the state of ``step``; a failure is logged, not raised. Collective.

        With ``async_mode = "async"`` and without ``wait``, a later ``finish`` commits it.
        """
        self.finish()
        self.begin(step)
        if wait or self._config.async_mode == "disabled":
            self.finish()

    def begin(self, step: int) -> None:
        """Begin to save the state of ``step``, which may change once this returns. Collective.

        With ``async_mode = "async"``, a thread writes a copy in host memory. ``finish`` logs its
        errors, and must be called before the next ``begin``.
        """
        assert self._pending is None, "finish() the pending save first"
        planner, began = dcp.DefaultSavePlanner(), time.monotonic()
        json_state: dict[str, Any] = {}
        try:
            scratch = run_on_rank0(partial(self._open_scratch, step))
            # Gathered, because an error on one rank only would leave the others waiting for it.
            is_new = gather_to_rank0(partial(self._read_states, planner, json_state))
            # Planned once: a rank writes the same items at every save, perhaps none. But the first
            # update, and what it adds to the optimizer's state, may come after the first save.
            if run_on_rank0(lambda: any(is_new)):
                self._plan = plan_writes(planner)
        except RankFailure as error:
            # The next save plans again, and deletes the scratch folder.
            self._planned = None
            self._log_failure(step, error)
            return
        assert self._plan is not None
        written: Future[dict[str, dict[str, Any]]] = Future()
        try:
            resolve: Callable[[WriteItem], Any] = planner.resolve_data
            if self._config.async_mode == "async":
                resolve = self._copy_to_host(planner, self._plan.items)
            written = self._writer.submit(_write, scratch, self._plan, resolve)
        except Exception as error:  # On this rank only: ``finish`` raises it on all ranks.
            written.set_exception(error)
        self._pending = PendingSave(step, scratch, json_state, written, began)
        if self._config.async_mode == "disabled":
            written.exception()

    def finish(self) -> Path | None:
        """Wait for the pending save, commit it and return its folder. Collective.

        Returns None if none is pending or if it failed, which is logged. Older checkpoints are
        untouched.
        """
        save, self._pending = self._pending, None
        if save is None:
            return None
        try:
            by_rank = gather_to_rank0(lambda: (save.json_state, save.written.result()))
            folder = run_on_rank0(partial(self._commit, save, by_rank))
        except RankFailure as error:
            self._log_failure(save.step, error)
            if self._rank == 0:
                shutil.rmtree(save.scratch, ignore_errors=True)
            return None
        self.newest_step = save.step
        self._verified.add(folder.name)
        self._on_saved(save.step)
        logger.info("checkpoint: saved %s in %.1f s", folder, time.monotonic() - save.began)
        if self._rank == 0 and self._config.keep_latest_k:
            self._purged = self._purger.submit(self._purge)
        return folder

    def _purge(self) -> None:
        keep, every = self._config.keep_latest_k, self._config.keep_every
        try:
            purge(
                self._folder, keep=keep, keep_every=every, verified=self._verified,
                raise_if_stopped=self._raise_if_retention_stopped,
            )  # fmt: skip
        except RetentionStopped:
            logger.info("checkpoint: the next start deletes older ones, which it verifies first")
        except OSError as error:
            logger.warning("checkpoint: older ones were not deleted: %s", error)

    def _raise_if_retention_stopped(self) -> None:
        if self._is_retention_stopped.is_set():
            raise RetentionStopped

    def close(self) -> None:
        """Wait for the writer; stop it and the retention thread, which may be hashing for hours."""
        self._writer.shutdown()
        self._is_retention_stopped.set()
        self._purger.shutdown()

    def load_latest(self, *, skip: Collection[str] = ()) -> int | None:
        """Load the newest checkpoint that verifies; return its step, None if there is none.

        Collective. ``skip``: names of ``json_states`` not to load. Quarantines damaged checkpoints
        that are newer. Raises ``ConfigError`` if the checkpoint belongs to another run, if none of
        those found verifies, or if there are some although checkpoints are off.
        """
        if not self._config.enable:
            if run_on_rank0(partial(list_checkpoints, self._folder)):
                text = "false, but the run has checkpoints, whose steps would be repeated"
                raise ConfigError([f"checkpoint.enable: {text}; set another job.name"])
            return None
        assert self._pending is None, "finish() the pending save first"
        if self._purged is not None:
            self._is_retention_stopped.set()
            self._purged.result()
            self._is_retention_stopped.clear()
        damaged: dict[Path, list[str]] = {}
        for folder in run_on_rank0(partial(list_checkpoints, self._folder)):
            problems = _verify(folder)
            if problems:
                damaged[folder] = problems
                continue
            manifest = run_on_rank0(partial(read_manifest, folder))
            _check_lineage(folder, manifest)
            if step_of(folder) != manifest["step"]:
                text = f"{folder} has the checkpoint of step {manifest['step']}: rename it"
                raise ConfigError([f"job.name: {text}"])
            self._validate(manifest)
            self._load(folder, manifest, self._tensor_states)
            self._load_json_states(folder, skip)
            # Only now: if no checkpoint verifies, none is renamed.
            for bad, found in damaged.items():
                renamed = run_on_rank0(partial(quarantine, bad, "corrupt"))
                logger.warning("checkpoint: quarantined as %s: %s", renamed, "; ".join(found))
            self._verified.add(folder.name)
            self._begin_lineage(manifest, run=manifest["run"])
            self.parent_attempt = manifest["attempt"]
            self.attempt = run_on_rank0(lambda: uuid.uuid4().hex)
            self.newest_step = manifest["step"]
            return self.newest_step
        if damaged:
            found = [problem for problems in damaged.values() for problem in problems]
            text = "no checkpoint verifies, none was changed: restore a copy or set another name"
            raise ConfigError([f"job.name: {text}: {'; '.join(found)}"])
        return None

    def load_initial(
        self, model: TensorState, validate: Callable[[dict[str, Any]], None] = lambda manifest: None
    ) -> None:
        """Load only the weights, from ``initial_load_path``. Collective. Mutates ``model``.

        ``validate``: called with the manifest. Raises ``ConfigError`` as it does, and if the
        checkpoint does not verify or does not match the model.
        """
        folder = Path(self._config.initial_load_path)
        if not run_on_rank0((folder / MANIFEST_FILE).exists):
            text = f"{folder} has no {MANIFEST_FILE} (Shardloom), nor config.json (Hugging Face)"
            if str(folder).count("/") == 1 and not run_on_rank0(folder.exists):
                text += f"; did you mean hf:{folder}?"
            if found := run_on_rank0(partial(list_checkpoints, folder / "checkpoints")):
                text += f"; it is a run folder: name one of its checkpoints, such as {found[0]}"
            raise ConfigError([f"checkpoint.initial_load_path: {text}"])
        problems = _verify(folder)
        if problems:
            raise ConfigError([f"checkpoint.initial_load_path: {problem}" for problem in problems])
        manifest = run_on_rank0(partial(read_manifest, folder))
        _check_lineage(folder, manifest)
        validate(manifest)
        self._load(folder, manifest, {"model": model})
        self._begin_lineage(manifest, run=self.attempt)

    def _begin_lineage(self, manifest: dict[str, Any], *, run: str) -> None:
        parent = {key: manifest[key] for key in ("run", "attempt", "step")}
        self._lineage = {"run": run, "parent": parent}

    def _open_scratch(self, step: int) -> Path:
        """Create a temporary folder; first delete those of earlier attempts, to free disk space."""
        make_folder(self._folder)
        newest = self._folder / f"step-{self.newest_step:08d}"
        if self.newest_step and not newest.exists():
            logger.error("ALARM: %s was removed or renamed while the run trains", newest)
        delete([*self._folder.glob(".tmp-step-*"), *self._folder.glob(".trash-*")])
        scratch = self._folder / f".tmp-step-{step:08d}-{uuid.uuid4().hex[:8]}"
        scratch.mkdir(mode=0o700)
        return scratch

    def _read_states(self, planner: dcp.DefaultSavePlanner, json_state: dict[str, Any]) -> bool:
        """Give the tensors to ``planner``, and copy the JSON states to ``json_state``.

        Returns True if this rank's tensors are not those of the last save.
        """
        tensors = {name: state.state_dict() for name, state in self._tensor_states.items()}
        planner.set_up_planner(tensors, is_coordinator=self._rank == 0)
        json_state |= {name: deepcopy(s.state_dict()) for name, s in self._json_states.items()}
        before = self._planned
        self._planned = {f"{name}.{key}" for name, part in tensors.items() for key in part}
        return self._planned != before

    def _copy_to_host(
        self, planner: dcp.DefaultSavePlanner, items: list[WriteItem]
    ) -> Callable[[WriteItem], torch.Tensor]:
        """Copy this rank's items to host buffers, which all saves reuse."""
        tensors = {item.index: cast(torch.Tensor, planner.resolve_data(item)) for item in items}
        new = [index for index in tensors if index not in self._host_buffers]
        buffers = allocate_like([tensors[index] for index in new])
        self._host_buffers |= zip(new, buffers, strict=True)
        for index, tensor in tensors.items():
            self._host_buffers[index].copy_(tensor.detach(), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return lambda item: self._host_buffers[item.index]

    def _commit(self, save: PendingSave, by_rank: list[Any]) -> Path:
        """Write the manifest and rename the scratch folder: from then on the checkpoint exists."""
        json_state: dict[str, Any] = reduce(merge, (state for state, _ in by_rank), {})
        written = {name: file for _, files in by_rank for name, file in files.items()}
        origin = {"step": save.step, "world_size": self._world_size, "attempt": self.attempt}
        write_metadata(
            save.scratch,
            written,
            state=json_state,
            metadata={**origin, **self._lineage, **self._metadata},
        )
        fsync_folder(save.scratch)
        self._before_commit()
        folder = self._folder / f"step-{save.step:08d}"
        if os.path.lexists(folder):
            # An earlier save of this step failed after its rename. Never overwrite.
            quarantine(folder, "replaced")
        save.scratch.rename(folder)
        fsync_folder(self._folder)
        return folder

    def _log_failure(self, step: int, error: Exception) -> None:
        text = "ALARM: checkpoint save failed at step %d (newest checkpoint: %s): %s"
        logger.error(text, step, self.newest_step or "none", error)

    def _load(
        self, folder: Path, manifest: dict[str, Any], tensor_states: dict[str, TensorState]
    ) -> None:
        index: dict[str, TensorRecord] = {}
        gather_to_rank0(lambda: index.update(read_index(folder, sizes_of(manifest))))
        saved = {
            name: {fqn.removeprefix(f"{name}.") for fqn in index if fqn.startswith(f"{name}.")}
            for name in tensor_states
        }
        state = {name: each.load_targets(saved[name]) for name, each in tensor_states.items()}
        wanted = {f"{name}.{key}": t for name, part in state.items() for key, t in part.items()}

        def differences() -> tuple[list[str], set[str]]:
            found = {f"{name}.{key}" for name, keys in saved.items() for key in keys}
            # Initial weights may have another dtype; on resume the dtypes must match.
            match_dtype = tensor_states is self._tensor_states
            return _differences(index, wanted, match_dtype=match_dtype), found - wanted.keys()

        answers = gather_to_rank0(differences)
        problems = run_on_rank0(partial(_merge_differences, answers))
        if problems:
            text = f"{folder} does not match the model: {'; '.join(problems)}"
            keys = "model.name, flavor or vocab_size"
            if not any(map(_is_of_model, problems)):
                keys = "optimizer.name"
            raise ConfigError([f"{keys}: {text}"])
        load_on_mesh(state, folder, index)
        for name, stateful in tensor_states.items():
            stateful.load_state_dict(state[name])

    def _load_json_states(self, folder: Path, skip: Collection[str]) -> None:
        state = run_on_rank0(partial(read_state, folder))
        for name in self._json_states.keys() - skip:
            try:
                self._json_states[name].load_state_dict(state[name])
            except ConfigError:
                raise
            except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
                text = f"{folder / STATE_FILE}: the state of {name!r} is invalid: {error!r}"
                raise ConfigError([text]) from error


def _write(
    scratch: Path, plan: WritePlan, resolve: Callable[[WriteItem], Any]
) -> dict[str, dict[str, Any]]:
    """Write the files of this rank; return the size and hash of each."""
    files = {plan.file: write_tensor_file(scratch / plan.file, plan.items, resolve)}
    if plan.index:
        files |= write_index(scratch, plan.index)
    return files


def _check_lineage(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise ``ConfigError`` if the manifest does not say which attempt saved it, at which step."""
    missing = [key for key in ("run", "attempt", "step") if key not in manifest]
    if missing:
        raise ConfigError([f"{folder / MANIFEST_FILE}: no {missing[0]}"])


def merge(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Union of two nested dicts; raise ``ValueError`` if they disagree on a key."""
    union = dict(first)
    for key, value in second.items():
        if isinstance(value, dict) and isinstance(union.get(key, {}), dict):
            union[key] = merge(union.get(key, {}), value)
        elif union.setdefault(key, value) != value:
            raise ValueError(f"ranks disagree on the state {key!r}: {union[key]!r} and {value!r}")
    return union


def _verify(folder: Path) -> list[str]:
    """Verify a checkpoint, each rank a part of its files; return the problems. Collective.

    Raises ``ConfigError`` if the ranks find different checkpoints there, as on local disks, and
    ``RankFailure`` if one cannot read for a reason that may pass.
    """
    digests: list[str] = []
    gather_to_rank0(lambda: digests.append(manifest_digest(folder)))
    raise_if_unequal({f"checkpoint {folder}": digests[0]})
    verify = partial(verify_checkpoint, folder, dist.get_rank(), dist.get_world_size())
    # Of a checkpoint that fewer ranks saved, a few ranks hash all bytes.
    found = gather_to_rank0(partial(call_beyond_timeout, verify))
    return run_on_rank0(lambda: sorted({problem for problems in found for problem in problems}))


def _differences(
    index: dict[str, TensorRecord], wanted: dict[str, torch.Tensor], *, match_dtype: bool
) -> list[str]:
    found = []
    for fqn, tensor in wanted.items():
        want = (str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        if fqn not in index:
            found.append(f"missing tensor {fqn}")
            continue
        have = (index[fqn].dtype, index[fqn].shape)
        if have[not match_dtype :] != want[not match_dtype :]:
            found.append(f"tensor {fqn} is {have[0]} {have[1]}, not {want[0]} {want[1]}")
    return found


def _merge_differences(answers: list[tuple[list[str], set[str]]]) -> list[str]:
    """First difference of each kind. A tensor is unexpected if no rank, of any stage, wants it."""
    unexpected = set.intersection(*(unread for _, unread in answers))
    found = sorted({problem for problems, _ in answers for problem in problems})
    # The state of the optimizer differs if the model does.
    found.sort(key=_is_of_model, reverse=True)
    return found[:1] + [f"unexpected tensor {fqn}" for fqn in sorted(unexpected)[:1]]


def _is_of_model(problem: str) -> bool:
    return "tensor model." in problem
