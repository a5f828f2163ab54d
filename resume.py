"""What a run starts from: its own newest checkpoint, or the weights of another run."""

import platform
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from checkpoint.checkpointer import Checkpointer
from checkpoint.hugging_face import TOKENIZER_FILE, is_hugging_face, load_weights
from checkpoint.manifest import read_manifest
from checkpoint.states import ModelState
from config import ConfigError
from config.changes import changed_arguments, compare
from data.tokenizer import load_tokenizer
from job import Job
from metrics.ledger import Attempt
from parallelisms.parallel_dims import ParallelDims
from runtime.log import logger
from runtime.together import on_first

# Letters, digits, blanks and what is not ASCII: tokenizers differ in all of them.
SAMPLE = "The naïve fox: 3.14159\n\n\tif (x != y):  return «世界»"


@dataclass
class TrainState:
    step: int = 0
    tokens: int = 0
    """Tokens trained on, over all ranks."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "tokens": self.tokens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.tokens = state_dict["step"], state_dict["tokens"]


def restore(job: Job, checkpointer: Checkpointer, model: ModelState) -> int | None:
    """Load the newest checkpoint that verifies and return its step; without one, load the weights
    that the config names, if any, and return None. A collective."""
    config = job.config
    resumed = checkpointer.load_latest()
    if resumed is not None:
        logger.info("resumed from step %d of %s", resumed, config.job.folder)
        if resumed >= config.training.steps:
            logger.info("nothing to do: training.steps is %d", config.training.steps)
    elif config.checkpoint.initial_load_path:
        initial = Path(config.checkpoint.initial_load_path)
        if on_first(partial(is_hugging_face, initial)):
            load_weights(initial, model, job.spec.hugging_face, job.args)
        else:
            checkpointer.load_initial(model)
        logger.info("weights from %s", initial)
        on_first(partial(warn_of_tokenizer, job))
    return resumed


def attempt_of(
    checkpointer: Checkpointer, job: Job, dims: ParallelDims, data_after: int | None = None
) -> Attempt:
    """The ledger's record of this start, or of a rollback that leaves out data."""
    return Attempt(
        attempt=checkpointer.attempt,
        parent=checkpointer.parent,
        resumed_from=checkpointer.newest,
        data_after=checkpointer.newest if data_after is None else data_after,
        world_size=dist.get_world_size(),
        rank=dist.get_rank(),
        place=dims.batch_mesh.get_local_rank(),
        n_rows=job.global_batch_size,
        ramp=job.ramp,
    )


def facts_of(job: Job) -> dict[str, Any]:
    """What a checkpoint records about its run, as JSON."""
    return {
        "config": job.config.model_dump(),
        "model_args": asdict(job.args),
        "fingerprints": {
            "tokenizer": job.tokenizer.fingerprint,
            "data": job.train.fingerprint,
        },
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def check_resume(job: Job, manifest: dict[str, Any]) -> None:
    """Log what changed since the checkpoint; raise ``ConfigError`` if it is another run's."""
    changes = compare(manifest["config"], job.config)
    changes.refuse_frozen()
    # Heads, rotary base, epsilon: they change no shape, so nothing else would notice.
    arguments = changed_arguments(manifest["model_args"], job.args)
    if arguments:
        raise ConfigError([f"model.flavor: {text} since the checkpoint" for text in arguments])
    for text in (*changes.recorded, *changes.free, *changes.gone):
        logger.info("changed since the checkpoint: %s", text)


def warn_of_tokenizer(job: Job) -> None:
    """Warn if a run's initial weights were trained with another tokenizer than its data's."""
    folder = Path(job.config.checkpoint.initial_load_path)
    if is_hugging_face(folder):
        try:
            theirs = load_tokenizer(str(folder / TOKENIZER_FILE)).encode(SAMPLE)
        except (OSError, ValueError) as error:
            logger.info("not known whether these weights were trained on such tokens: %s", error)
            return
        is_same = np.array_equal(theirs, job.tokenizer.encode(SAMPLE))
    else:
        fingerprint = read_manifest(folder)["fingerprints"]["tokenizer"]
        is_same = fingerprint in (None, job.tokenizer.fingerprint)
    if not is_same:
        text = (
            "data.tokenizer: %s is not that of %s: its ids may mean something else to these weights"
        )
        logger.warning(text, job.config.data.tokenizer, folder)
