"""Resolve a configuration: look up and check everything it names, before ranks connect."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from config import ConfigError, JobConfig
from config.hub_names import CONFIG_FILES
from config.resume_compat import by_key, shown
from data.batch_size import Ramp, batch_size_of, sequences_in
from data.loader import LoaderConfig, MicrobatchLoader
from data.mixture import Mixture
from data.sources import build_sources
from data.step_batches import StepBatches
from data.tokenizer import Tokenizer, load_tokenizer
from data.validation_sources import build_validation_sources
from metrics.trackers import check_installed
from models import ModelSpec, TransformerArgs, find_model
from optim.outside import outside_optimizer
from optim.schedule import build_lr_schedule
from parallelisms.constraints import check_constraints
from parallelisms.parallel_dims import ParallelDims
from runtime.control import RunControl
from runtime.distributed import compute_dtype
from runtime.hub_paths import local_path
from runtime.log import logger
from runtime.torch_device import machine_facts


@dataclass(frozen=True)
class RunSpec:
    """A run, resolved and checked: what its configuration names, opened."""

    config: JobConfig
    """With the vocabulary, batch size, schedule's steps and commits of datasets filled in where the
    TOML leaves them."""
    model_spec: ModelSpec
    model_args: TransformerArgs
    tokenizer: Tokenizer
    training_data: Mixture
    held_out: dict[str, Mixture]
    """Validation documents by the label of their source."""
    microbatch_size: int
    """Sequences of one forward pass on a rank."""
    global_batch_size: int
    ramp: Ramp
    """(steps, batch size) of each phase before ``global_batch_size``."""
    lr_factor: Callable[[int], float]
    """Factor on the peak learning rate by optimizer step, 1-based."""

    @property
    def folder(self) -> Path:
        return self.config.job.folder

    def build_loader(
        self, mixture: Mixture, dims: ParallelDims, device: torch.device
    ) -> MicrobatchLoader:
        """Build the loader of this data-parallel rank's rows of every global batch."""
        return MicrobatchLoader(
            mixture,
            self.tokenizer,
            LoaderConfig(
                vocab_size=self.model_args.vocab_size,
                seq_len=self.config.training.seq_len,
                microbatch_size=self.microbatch_size,
                global_batch_size=self.global_batch_size,
                dp_rank=dims.batch_mesh.get_local_rank(),
                dp_degree=dims.degrees.batch,
                document_mask=self.config.data.document_mask,
                prefetch=self.config.data.prefetch,
                packing=self.config.data.packing,
                pin_memory=device.type == "cuda",
            ),
        )

    def build_batches(
        self, loader: MicrobatchLoader, control: RunControl, dims: ParallelDims
    ) -> StepBatches:
        """Build the iterator over the batches of steps, which ``loader`` reads."""
        return StepBatches(
            loader,
            control,
            batch_size=self.batch_size,
            global_batch_size=self.global_batch_size,
            n_readers=dist.get_world_size() // dims.degrees.batch,
            max_bad_records=self.config.data.max_bad_records,
        )

    def allows(self, config: JobConfig) -> bool:
        """True if this run's model and ranks could train with ``config``."""
        try:
            check_constraints(config, self.model_args, dist.get_world_size(), **machine_facts())
        except ConfigError:
            return False
        return True

    def n_microbatches(self, batch_degree: int) -> int:
        """Microbatches of each rank in a global batch; ``batch_degree`` ranks read different
        sequences."""
        return self.global_batch_size // (self.microbatch_size * batch_degree)

    def batch_size(self, step: int) -> int:
        """Return the global batch size of ``step``, 1-based, in sequences."""
        return batch_size_of(step, self.ramp, self.global_batch_size)

    def steps_left(self, step: int) -> float:
        """Return the work left after ``step``, in steps of that step's batch size."""
        done, total = (
            sequences_in(steps, self.ramp, self.global_batch_size)
            for steps in (step, self.config.training.steps)
        )
        return (total - done) / self.batch_size(step)

    @property
    def sources(self) -> list[tuple[str, int | None]]:
        """(label, number of documents or None if unknown) of each training source."""
        return [
            (source.label, documents.n_documents)
            for source, documents in zip(
                self.config.data.mixture, self.training_data.sources, strict=True
            )
        ]

    def facts(self, device: torch.device) -> dict[str, str]:
        """Return all that must be equal on every rank, by name.

        No key may differ between nodes: most decide a number or when a collective runs, and all of
        them are in the one ``config.toml``. A folder that is mounted elsewhere needs a link.
        """
        sources = zip(self.config.data.mixture, self.training_data.sources, strict=True)
        own = self.validation_fingerprints.items()
        return {
            **{key: shown(value) for key, value in by_key(self.config.model_dump()).items()},
            **{f"model.flavor, {k}": shown(v) for k, v in asdict(self.model_args).items()},
            "dtype of compute": str(compute_dtype(self.config.training, device)),
            "tokenizer": self.tokenizer.fingerprint,
            **{f"documents of {s.label}": documents.fingerprint for s, documents in sources},
            **{f"documents of validation.sources, {name}": text for name, text in own},
        }

    @property
    def validation_fingerprints(self) -> dict[str, str]:
        """Fingerprints of ``[[validation.sources]]`` by name; {} if documents are held out."""
        has_own = bool(self.config.validation.sources)
        return {name: m.fingerprint for name, m in self.held_out.items()} if has_own else {}

    @property
    def tokenizer_text(self) -> str:
        """Name of the tokenizer, and how documents begin and end, for the log."""
        return f"{self.config.data.tokenizer} ({self.tokenizer.document_form})"

    @property
    def wants_flex_attention(self) -> bool:
        """True if attention has a mask besides the causal one: of documents or gathered keys.

        Not with zero bubble, whose backward runs each graph twice; compiled graphs forbid that.
        """
        parallelism = self.config.parallelism
        gathers = (
            parallelism.context_parallel_degree > 1
            and parallelism.context_parallel_method == "allgather"
        )
        has_mask = self.config.data.document_mask or gathers
        return has_mask and parallelism.pipeline_parallel_schedule != "InterleavedZeroBubble"


def resolve(config: JobConfig, world_size: int, *, has_gpu: bool | None = None) -> RunSpec:
    """Return the run that ``config`` describes, before any process group. Raises ``ValueError``.

    ``has_gpu``: of the machine that will train; None: of this one.
    """
    spec, published_args = model_of(config)
    machine = machine_facts() if has_gpu is None else {"has_gpu": has_gpu}
    degrees = check_constraints(config, published_args, world_size, **machine)
    check_installed(config.metrics.trackers)
    tokenizer = load_tokenizer(config.data.tokenizer, bos=config.data.bos, eos=config.data.eos)
    # Multiples of 64 suit tensor cores, and tensor parallel degrees of powers of two.
    vocab_size = config.model.vocab_size or -(-tokenizer.n_vocab // 64) * 64
    if vocab_size < tokenizer.n_vocab:
        raise ValueError(f"model.vocab_size: must be at least the tokenizer's {tokenizer.n_vocab}")
    if any(source.is_on_hub for source in (*config.data.mixture, *config.validation.sources)):
        # Imported here, because datasets takes a second to import.
        from data.hub import pin_datasets

        config = pin_datasets(config)
    training_data, held_out = build_data(config, tokenizer)
    total_steps = config.lr_scheduler.total_steps or config.training.steps
    ramp_steps = sum(phase.steps for phase in config.training.batch_size_ramp)
    if ramp_steps >= config.training.steps:
        logger.warning(
            "training.batch_size_ramp has %d steps, training.steps is %d: global_batch_size is"
            " never reached", ramp_steps, config.training.steps,
        )  # fmt: skip
    if config.optimizer.is_outside:
        outside_optimizer(config.optimizer)
    one_microbatch = config.training.decided_local_batch_size * degrees.batch
    batch_size = config.training.global_batch_size or one_microbatch
    resolved = {
        "model": config.model.model_copy(update={"vocab_size": vocab_size}),
        "training": config.training.model_copy(update={"global_batch_size": batch_size}),
        "lr_scheduler": config.lr_scheduler.model_copy(update={"total_steps": total_steps}),
    }
    overrides: dict[str, Any] = {"vocab_size": vocab_size, "max_seq_len": config.training.seq_len}
    if hasattr(published_args, "balance_weight"):
        # The loss is per sequence and summed over the step; a ramp's smaller steps rescale it.
        overrides["balance_weight"] = config.experts.balance_loss / batch_size
    return RunSpec(
        config=config.model_copy(update=resolved),
        model_spec=spec,
        model_args=replace(published_args, **overrides),
        tokenizer=tokenizer,
        training_data=training_data,
        held_out=held_out,
        microbatch_size=config.parallelism.pipeline_parallel_microbatch_size
        if degrees.pp > 1
        else config.training.decided_local_batch_size,
        global_batch_size=batch_size,
        ramp=[(p.steps, p.global_batch_size) for p in config.training.batch_size_ramp],
        lr_factor=build_lr_schedule(config.lr_scheduler, total_steps),
    )


def model_of(config: JobConfig) -> tuple[ModelSpec, TransformerArgs]:
    """Return the model's family, and its flavor's args with those of ``model.args``."""
    flavor = local_path(config.model.flavor, CONFIG_FILES, key="model.flavor")
    return find_model(config.model.name, flavor, config.model.args)


def build_data(config: JobConfig, tokenizer: Tokenizer) -> tuple[Mixture, dict[str, Mixture]]:
    """Open the documents of training, and those of validation by the label of their source."""
    own = build_validation_sources(
        config.validation.sources, config.data, config.debug.seed, tokenizer
    )
    train, held_out = build_sources(
        config.data,
        config.debug.seed,
        with_held_out=config.validation.enable and not own.sources,
        tokenizer=tokenizer,
        reserved=own.reserved,
    )
    skips_bad = config.data.on_bad_record == "skip"
    weights = [source.weight for source in config.data.mixture]
    return Mixture(train, weights, skips_bad=skips_bad), {
        label: Mixture([source], skips_bad=skips_bad)
        for label, source in (own.sources or held_out).items()
    }
