"""Start from the run's newest checkpoint, or from the weights of another run."""

import platform
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from build_model import ShardedModel
from checkpoint.checkpointer import Checkpointer
from checkpoint.hugging_face import check_pairs, is_hugging_face, load_weights
from checkpoint.manifest import MANIFEST_FILE, read_manifest
from checkpoint.states import ModelState, OptimizerState
from config import ConfigError, JobConfig
from config.hub_names import INITIAL_LOAD_PATH, WEIGHT_FILES
from config.resume_compat import NEW_JOB_HINT, by_key, changed_arguments, compare
from data.loader import MicrobatchLoader
from data.tokenizer import Tokenizer, load_tokenizer
from metrics.ledger import AttemptHeader
from models.meta import build_on_meta
from optim.spikes import LossSpikeDetector
from parallelisms.parallel_dims import ParallelDims
from run_spec import RunSpec
from runtime.control import RunControl
from runtime.hub_paths import local_path
from runtime.log import logger, show_phase
from runtime.object_collectives import run_on_rank0
from runtime.run_folder import list_checkpoints, step_of
from train_step import TrainStep

OTHER_IDS = "other ids"
# Letters, digits, whitespace and non-ASCII text: tokenizers differ in all of them.
TOKENIZER_PROBE = "The naïve fox: 3.14159\n\n\tif (x != y):  return «世界»"


@dataclass
class TrainState:
    """Counters of the run that a checkpoint holds."""

    step: int = 0
    tokens: int = 0
    """Tokens trained on, over all ranks."""
    lacks_validation: bool = False
    """True if a request to stop ended the validation after this step."""

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.tokens = state_dict["step"], state_dict["tokens"]
        self.lacks_validation = state_dict.get("lacks_validation", False)


def build_checkpointer(
    run: RunSpec,
    model: ShardedModel,
    train_step: TrainStep,
    control: RunControl,
    *,
    loader: MicrobatchLoader,
    spikes: LossSpikeDetector,
    state: TrainState,
) -> Checkpointer:
    """Build the checkpointer over all state of the run. Collective."""
    return Checkpointer(
        run.folder / "checkpoints",
        run.config.checkpoint,
        tensor_states={
            "model": ModelState(model.module),
            "optimizer": OptimizerState(model.module, train_step.optimizer),
        },
        json_states={
            "data": loader,
            "train": state,
            "nonfinite": train_step.nonfinite,
            "spikes": spikes,
        },
        metadata=checkpoint_metadata(run),
        validate=partial(validate_resume, run),
        before_commit=control.check_lock,
        on_saved=lambda step: control.report("progress", str(step)),
    )


def restore(run: RunSpec, checkpointer: Checkpointer, model: ShardedModel) -> int | None:
    """Load the newest checkpoint that verifies and return its step. Collective.

    Without one, load ``checkpoint.initial_load_path``, if any, and return None.
    """
    config = run.config
    show_phase("loading the newest checkpoint, if any")
    resumed_step = checkpointer.load_latest()
    if resumed_step is not None:
        logger.info("resumed from step %d of %s", resumed_step, config.job.folder)
        run_on_rank0(partial(warn_if_data_changed, run, resumed_step))
        if resumed_step >= config.training.steps:
            logger.info("nothing to do: training.steps is %d", config.training.steps)
            logger.info("%s stays as it is", config.job.folder / "config.toml")
    elif config.checkpoint.initial_load_path:
        initial, weights = initial_path(config), ModelState(model.module)
        if run_on_rank0(partial(is_hugging_face, initial)):
            run_on_rank0(partial(_check_table, run))
            load_weights(initial, weights, run.model_spec.hugging_face, run.model_args)
        else:
            checkpointer.load_initial(weights, partial(validate_initial, run))
        logger.info("weights from %s", config.checkpoint.initial_load_path)
        run_on_rank0(partial(warn_if_tokenizer_differs, run))
    return resumed_step


def _check_table(run: RunSpec) -> None:
    """Raise ``ConfigError`` if the family's table lacks tensors of the model."""
    spec, args = run.model_spec, run.model_args
    if spec.hugging_face is not None:
        names = build_on_meta(spec, args, torch.float32).state_dict()
        check_pairs(spec.hugging_face.tensors(args), names)


def initial_path(config: JobConfig) -> Path:
    """Path of ``checkpoint.initial_load_path``. Raises ``ValueError`` if it is not in the cache."""
    name = config.checkpoint.initial_load_path
    return Path(local_path(name, WEIGHT_FILES, key=INITIAL_LOAD_PATH))


def attempt_of(
    checkpointer: Checkpointer, run: RunSpec, dims: ParallelDims, data_after: int | None = None
) -> AttemptHeader:
    """Describe this start for the ledger, or a rollback that skips data up to ``data_after``."""
    return AttemptHeader(
        attempt=checkpointer.attempt,
        parent=checkpointer.parent_attempt,
        resumed_from=checkpointer.newest_step,
        data_after=checkpointer.newest_step if data_after is None else data_after,
        world_size=dist.get_world_size(),
        rank=dist.get_rank(),
        dp_rank=dims.batch_mesh.get_local_rank(),
        n_rows=run.global_batch_size,
        ramp=run.ramp,
    )


def checkpoint_metadata(run: RunSpec) -> dict[str, Any]:
    """Return what a checkpoint's manifest says about its run, as JSON."""
    return {
        "config": run.config.model_dump(),
        "model_args": asdict(run.model_args),
        "fingerprints": {
            "tokenizer": run.tokenizer.fingerprint,
            "data": run.training_data.fingerprint,
            "validation": run.validation_fingerprints,
        },
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def validate_resume(run: RunSpec, manifest: dict[str, Any]) -> None:
    """Log what changed since the checkpoint. Raises ``ConfigError`` if it is another run's."""
    for key in ("config", "model_args"):
        if key not in manifest:
            raise ConfigError([f"job.name: the checkpoint's manifest has no {key}"])
    changes = compare(manifest["config"], run.config)
    changes.raise_if_frozen_changed(run.folder)
    _check_arguments(run, manifest)
    _check_validation(run, manifest)
    for text in (*changes.recorded, *changes.free, *changes.gone):
        logger.info("changed since the checkpoint: %s", text)


def validate_initial(run: RunSpec, manifest: dict[str, Any]) -> None:
    """Raise ``ConfigError`` if the weights to start from are of a model with other arguments.

    A model of another name may have arguments besides.
    """
    saved, config = manifest.get("model_args"), manifest.get("config")
    if not isinstance(saved, dict) or not isinstance(config, dict):
        raise ConfigError([f"{INITIAL_LOAD_PATH}: its manifest has no model_args, or no config"])
    if by_key(config).get("model.name") != run.config.model.name:
        now = asdict(run.model_args)
        saved = now | {name: value for name, value in saved.items() if name in now}
    if changed := changed_arguments(saved, run.model_args):
        path, found = run.config.checkpoint.initial_load_path, "; ".join(changed)
        text = f"{path} was trained with other model.args or model.flavor: {found}"
        raise ConfigError([f"{INITIAL_LOAD_PATH}: {text}"])


def _check_arguments(run: RunSpec, manifest: dict[str, Any]) -> None:
    """Raise ``ConfigError`` if the model has other arguments, by the keys that set them."""
    # Heads, rotary base and epsilon change no shape, so loading would not fail.
    changed = changed_arguments(manifest["model_args"], run.model_args)
    before = by_key(manifest["config"]).get("model.args")
    given = {*run.config.model.args, *(before if isinstance(before, dict) else ())}
    errors = []
    for text in changed:
        is_given = text.partition(":")[0].partition(".")[0] in given
        key = f"model.args.{text}" if is_given else f"model.flavor: {text}"
        errors.append(f"{key} since the checkpoint in {run.folder}; {NEW_JOB_HINT}")
    if errors:
        raise ConfigError(errors)


def _check_validation(run: RunSpec, manifest: dict[str, Any]) -> None:
    """Raise ``ConfigError`` if a validation source has other documents than at the checkpoint."""
    fingerprints = manifest.get("fingerprints")
    saved = fingerprints.get("validation") if isinstance(fingerprints, dict) else None
    for name, fingerprint in run.validation_fingerprints.items():
        before = saved.get(name, fingerprint) if isinstance(saved, dict) else fingerprint
        if before != fingerprint:
            text = "its documents changed since the checkpoint: give it another name"
            raise ConfigError([f"validation.sources, {name}: {text}"])


def warn_if_data_changed(run: RunSpec, step: int) -> None:
    """Warn of data files newer than the checkpoint: fingerprints read only a few documents."""
    folders = list_checkpoints(run.folder / "checkpoints")
    checkpoint = next(folder for folder in folders if step_of(folder) == step)
    saved = (checkpoint / MANIFEST_FILE).stat().st_mtime
    changed = [path for s in run.training_data.sources for path in s.changed_since(saved)]
    if changed:
        text = "data: %d files changed after %s was saved, the first %s: are they the same?"
        logger.warning(text, len(changed), checkpoint.name, changed[0])


def warn_if_tokenizer_differs(run: RunSpec) -> None:
    """Warn if the initial weights were trained with another tokenizer."""
    folder = initial_path(run.config)
    try:
        if is_hugging_face(folder):
            difference = _difference(load_tokenizer(str(folder)), run.tokenizer)
        else:
            difference = _difference_to(read_manifest(folder), run.tokenizer)
    except ValueError as error:
        reason = str(error).removeprefix("data.tokenizer: ")
        logger.info("initial weights: cannot check the tokenizer: %s", reason)
        return
    if difference:
        text = "data.tokenizer: %s is not the tokenizer of %s: its weights know %s"
        logger.warning(text, run.config.data.tokenizer, folder, difference)


def _difference_to(manifest: dict[str, Any], tokenizer: Tokenizer) -> str:
    """Ids that a checkpoint's weights know instead of those of ``tokenizer``; "" if they know the
    same, maybe from another file."""
    fingerprint = manifest.get("fingerprints", {}).get("tokenizer")
    if fingerprint in (None, tokenizer.fingerprint):
        return ""
    keys = manifest.get("config", {}).get("data", {})
    try:
        saved = load_tokenizer(keys["tokenizer"], bos=keys.get("bos"), eos=keys.get("eos"))
    except (KeyError, ValueError):
        return OTHER_IDS
    return _difference(saved, tokenizer) if saved.fingerprint == fingerprint else OTHER_IDS


def _difference(known: Tokenizer, tokenizer: Tokenizer) -> str:
    if not np.array_equal(known.encode(TOKENIZER_PROBE), tokenizer.encode(TOKENIZER_PROBE)):
        return OTHER_IDS
    for key, one, other in (
        ("data.bos", known.bos_id, tokenizer.bos_id),
        ("data.eos", known.eos_id, tokenizer.eos_id),
    ):
        if one != other:
            texts = ["none" if each is None else f"id {each}" for each in (one, other)]
            return f"{texts[0]} as {key}, not {texts[1]}"
    return ""
