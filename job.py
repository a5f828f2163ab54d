"""Turn a configuration into a job: look up and check what it names, before ranks connect."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from config import JobConfig
from data.batch_size import Ramp, batch_size_of, sequences_in
from data.mixture import Mixture
from data.sources import build_sources
from data.tokenizer import Tokenizer, load_tokenizer
from models import ModelSpec, TransformerArgs, find_model
from parallelisms.support import check_support
from runtime.log import logger


@dataclass(frozen=True)
class Job:
    """The run that is asked for, looked up and checked."""

    config: JobConfig
    """Resolved: values that were absent and follow from the rest are filled in."""
    spec: ModelSpec
    args: TransformerArgs
    tokenizer: Tokenizer
    train: Mixture
    held_out: dict[str, Mixture]
    """By the source's label."""
    microbatch_size: int
    """Sequences that a rank computes at once."""
    global_batch_size: int
    ramp: Ramp
    """Phases of the batch size on its way up to ``global_batch_size``."""
    total_steps: int
    """The horizon of the learning rate's schedule."""

    def batch_size(self, step: int) -> int:
        """Sequences of a step, from 1 on."""
        return batch_size_of(step, self.ramp, self.global_batch_size)

    def steps_left(self, step: int) -> float:
        """The work left after ``step``, counted in steps of that step's batch size."""
        done, total = (
            sequences_in(steps, self.ramp, self.global_batch_size)
            for steps in (step, self.config.training.steps)
        )
        return (total - done) / self.batch_size(step)

    @property
    def sources(self) -> list[tuple[str, int | None]]:
        """Label of each source, and how many documents it has, where that is known."""
        return [
            (source.label, documents.n_documents)
            for source, documents in zip(self.config.data.mixture, self.train.sources, strict=True)
        ]

    @property
    def wants_flex_attention(self) -> bool:
        """Whether attention needs the kernel for masks other than the causal one: of documents, or
        where keys are gathered. Zero bubble cannot use it: it goes through a graph twice, which
        compiled graphs forbid."""
        parallelism = self.config.parallelism
        has_context = parallelism.context_parallel_degree > 1
        gathers = has_context and parallelism.context_parallel_method == "allgather"
        is_masked = self.config.data.document_mask or gathers
        return is_masked and parallelism.pipeline_parallel_schedule != "InterleavedZeroBubble"


def resolve(config: JobConfig, world_size: int) -> Job:
    """Look up and open what the config names; raise ``ValueError`` before any process group."""
    spec, published_args = find_model(config.model.name, config.model.flavor)
    has_gpu = torch.cuda.is_available()
    degrees = check_support(config, published_args, world_size, has_gpu=has_gpu)
    tokenizer = load_tokenizer(config.data.tokenizer)
    # Multiples of 64 suit tensor cores, and tensor parallel degrees of powers of two.
    vocab_size = config.model.vocab_size or -(-tokenizer.n_vocab // 64) * 64
    if vocab_size < tokenizer.n_vocab:
        raise ValueError(f"model.vocab_size: must be at least the tokenizer's {tokenizer.n_vocab}")
    train, held_out = build_sources(
        config.data,
        config.debug.seed,
        with_held_out=config.validation.enable,
        tokenizer=tokenizer,
    )
    total_steps = config.lr_scheduler.total_steps or config.training.steps
    warmup = config.lr_scheduler.warmup_steps
    if warmup > total_steps:
        logger.warning(
            "lr_scheduler.warmup_steps: %d of %d steps: lr only grows, to %.0f %% of optimizer.lr",
            warmup, total_steps, 100 * total_steps / warmup,
        )  # fmt: skip
    weights = [source.weight for source in config.data.mixture]
    one_microbatch = config.training.local_batch_size * degrees.batch
    batch_size = config.training.global_batch_size or one_microbatch
    parallelism = config.parallelism
    if degrees.pp > 1 and parallelism.data_parallel == "fsdp2":
        # PyTorch's pipeline schedules do so.
        last = {"fsdp_reduce_gradients": "last_microbatch"}
        parallelism = parallelism.model_copy(update=last)
    resolved = {
        "parallelism": parallelism,
        "model": config.model.model_copy(update={"vocab_size": vocab_size}),
        "training": config.training.model_copy(update={"global_batch_size": batch_size}),
        "lr_scheduler": config.lr_scheduler.model_copy(update={"total_steps": total_steps}),
    }
    sizes: dict[str, Any] = {"vocab_size": vocab_size, "max_seq_len": config.training.seq_len}
    if hasattr(published_args, "balance_weight"):
        sizes["balance_weight"] = config.experts.balance_loss / batch_size
    return Job(
        config=config.model_copy(update=resolved),
        spec=spec,
        args=replace(published_args, **sizes),
        tokenizer=tokenizer,
        train=Mixture(train, weights),
        held_out={label: Mixture([source]) for label, source in held_out.items()},
        microbatch_size=config.parallelism.pipeline_parallel_microbatch_size
        if degrees.pp > 1
        else config.training.local_batch_size,
        global_batch_size=batch_size,
        ramp=[(p.steps, p.global_batch_size) for p in config.training.batch_size_ramp],
        total_steps=total_steps,
    )
