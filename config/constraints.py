"""Constraints between keys of the config that depend on neither the ranks nor the hardware.

Those that do are in ``parallelisms/constraints.py``, which checks both tables.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from config.job_config import (
    ONE_SOURCE,
    DataSource,
    DocumentSource,
    Float8,
    JobConfig,
)
from config.paths import is_url

T = TypeVar("T")
# The largest decay at which a bfloat16 moment still shrinks when its gradient is 0. Neighbouring
# values differ by a factor of up to 1 + 2**-7; a change of less than half of that is rounded away.
MAX_BFLOAT16_DECAY = 1 - 2**-8
BFLOAT16_MOMENTS = " with moments in bfloat16, which rounds away any slower decay"


@dataclass(frozen=True)
class Constraint(Generic[T]):
    """Rule that a config, or a run, of type ``T`` must satisfy."""

    key: str
    """TOML key that the user has to change."""
    reason: str
    violated: Callable[[T], bool]
    detail: Callable[[T], str] | None = None
    """Values that violate it, appended to the message."""

    def message(self, run: T) -> str:
        detail = f" ({self.detail(run)})" if self.detail is not None else ""
        return f"{self.key}: {self.reason}{detail}"


def is_set(section: BaseModel, *keys: str) -> bool:
    """True if any of these keys differs from its default."""
    fields = type(section).model_fields
    return any(getattr(section, key) != fields[key].get_default() for key in keys)


def _only_with(
    key: str, condition: str, is_met: Callable[[JobConfig], bool]
) -> Constraint[JobConfig]:
    section, name = key.split(".")
    return Constraint(
        key,
        f"has no effect unless {condition}",
        lambda config: not is_met(config) and is_set(getattr(config, section), name),
    )


def _only_source(violated: Callable[[DocumentSource], bool]) -> Callable[[JobConfig], bool]:
    """Of the keys of ``[data]``, which describe a source unless there is a list of them."""
    return lambda config: not config.data.sources and violated(config.data.mixture[0])


def _any_of(key: str, reason: str, violated: Callable[[Any], bool]) -> Constraint[JobConfig]:
    """Constraint on each entry of the list ``key``; the message names those that violate it."""
    section, name = key.split(".")

    def labels(config: JobConfig) -> list[str]:
        sources = getattr(getattr(config, section), name)
        return [source.label for source in sources if violated(source)]

    return Constraint(
        key, reason, lambda config: bool(labels(config)), lambda config: ", ".join(labels(config))
    )


def _lacks_path(source: DocumentSource) -> bool:
    return source.type in ("files", "text", "tokens", "huggingface") and not source.path


def _has_no_path(source: DocumentSource) -> bool:
    return source.type in ("builtin", "c4") and source.path != ""


def _has_no_subset(source: DocumentSource) -> bool:
    return source.type != "huggingface" and source.subset != ""


def _has_no_revision(source: DocumentSource) -> bool:
    return not source.is_on_hub and source.revision != ""


def _has_no_text_key(source: DocumentSource) -> bool:
    has_columns = source.type in ("files", "huggingface")
    return not has_columns and source.text_key != DataSource().text_key


def _has_no_args(source: DocumentSource) -> bool:
    return not source.is_outside and source.args != {}


# Of the entries of lists of sources.
LISTS = ("data.sources", "validation.sources")
SOURCE_RULES: tuple[tuple[str, Callable[[DocumentSource], bool]], ...] = (
    ("path must be set for the types files, text, tokens and huggingface", _lacks_path),
    ("path has no effect for the types builtin and c4", _has_no_path),
    ("subset has no effect unless the type is huggingface", _has_no_subset),
    ("revision has no effect unless the type is c4 or huggingface", _has_no_revision),
    ("text_key has no effect unless the type is files or huggingface", _has_no_text_key),
    ("args has no effect unless the type is module:attribute", _has_no_args),
)


def _shared_documents(sources: Sequence[DocumentSource]) -> list[str]:
    """Labels of sources that repeat an earlier one."""
    unlike = {"name", "weight", "repeat", "exclude_from_training"}
    first = [source.model_dump(exclude=unlike) for source in sources]
    return [source.label for i, source in enumerate(sources) if first[i] in first[:i]]


def _shared_labels(sources: Sequence[DocumentSource]) -> list[str]:
    counts = Counter(source.label for source in sources)
    return [label for label, count in counts.items() if count > 1]


def _trains_past_total_steps(config: JobConfig) -> bool:
    total = config.lr_scheduler.total_steps
    return total is not None and total < config.training.steps


def is_float8(config: JobConfig) -> bool:
    """True if linear layers multiply in float8."""
    return config.float8.recipe != "none"


def has_budget(config: JobConfig) -> bool:
    """True if ``torch.compile`` chooses what is recomputed, by a memory budget."""
    return config.activation_checkpoint.mode == "memory_budget"


def _has_muon(config: JobConfig) -> bool:
    return config.optimizer.name == "muon"


def _only_with_own_optimizer(name: str) -> Constraint[JobConfig]:
    return _only_with(
        f"optimizer.{name}",
        'optimizer.name is "adamw" or "muon"',
        lambda config: not config.optimizer.is_outside,
    )


def _has_bfloat16_moments(config: JobConfig) -> bool:
    return "bfloat16" in (config.optimizer.state_dtype, config.training.dtype)


def _is_mixed(config: JobConfig) -> bool:
    """True if the compute dtype may differ from the weights'."""
    return config.training.dtype == "float32"


CONFIG_CONSTRAINTS: tuple[Constraint[JobConfig], ...] = (
    *(_only_with_own_optimizer(name)
      for name in ("beta1", "beta2", "eps", "state_dtype", "param_remainders")),
    _only_with("optimizer.args", "optimizer.name is module:attribute",
               lambda config: config.optimizer.is_outside),
    _only_with("lr_scheduler.args", "lr_scheduler.decay_type is module:attribute",
               lambda config: config.lr_scheduler.is_outside),
    _only_with("optimizer.muon_momentum", 'optimizer.name = "muon"', _has_muon),
    Constraint("optimizer.muon_momentum", f"must be at most 0.99609375{BFLOAT16_MOMENTS}",
            lambda config: _has_bfloat16_moments(config)
            and config.optimizer.muon_momentum > MAX_BFLOAT16_DECAY),
    Constraint("optimizer.name", 'must be "adamw" with debug.deterministic = "elastic"',
            lambda config: config.optimizer.name != "adamw" and config.debug.is_elastic),
    _only_with("optimizer.state_dtype", 'training.dtype = "float32"', _is_mixed),
    _only_with("optimizer.param_remainders", 'training.dtype = "bfloat16"',
               lambda config: config.training.dtype == "bfloat16"),
    Constraint("optimizer.beta1", f"must be at most 0.99609375{BFLOAT16_MOMENTS}",
            lambda config: _has_bfloat16_moments(config)
            and config.optimizer.beta1 > MAX_BFLOAT16_DECAY),
    Constraint("optimizer.beta2", f"must be at most 0.99609375{BFLOAT16_MOMENTS}",
            lambda config: _has_bfloat16_moments(config)
            and config.optimizer.beta2 > MAX_BFLOAT16_DECAY),
    _only_with("training.mixed_precision_param", 'training.dtype = "float32"', _is_mixed),
    _only_with("training.mixed_precision_reduce", 'training.dtype = "float32"', _is_mixed),
    _only_with("activation_checkpoint.selective", 'activation_checkpoint.mode = "selective"',
               lambda config: config.activation_checkpoint.mode == "selective"),
    Constraint("training.local_batch_size", '"auto" requires training.global_batch_size',
            lambda config: config.training.local_batch_size == "auto"
            and config.training.global_batch_size is None),
    Constraint("training.local_batch_size",
            '"auto" is not supported with pipelines, whose microbatches have'
            " parallelism.pipeline_parallel_microbatch_size sequences",
            lambda config: config.training.local_batch_size == "auto"
            and config.parallelism.pipeline_parallel_degree > 1),
    _only_with("activation_checkpoint.memory_budget",
               'activation_checkpoint.mode = "memory_budget"', has_budget),
    Constraint("activation_checkpoint.mode",
            '"memory_budget" requires compile.enable, and compile.backend = "inductor" or'
            ' "aot_eager_decomp_partition"',
            lambda config: has_budget(config) and not (config.compile.enable
            and config.compile.backend in ("inductor", "aot_eager_decomp_partition"))),
    Constraint("compile.backend", "has no effect without compile.enable",
            lambda config: not config.compile.enable and is_set(config.compile, "backend")),
    Constraint("float8.recipe", 'with "none", float8.skip, skip_small and emulate have no effect',
            lambda config: not is_float8(config) and config.float8 != Float8()),
    Constraint("float8.recipe",
            'training.dtype = "float64" and mixed_precision_param = "float32" are supported only'
            " with float8.emulate: the hardware multiplies quantized bfloat16",
            lambda config: is_float8(config) and not config.float8.emulate
            and (config.training.dtype == "float64"
                 or config.training.mixed_precision_param == "float32")),
    Constraint("debug.deterministic", '"elastic" is not supported with float8',
            lambda config: is_float8(config) and config.debug.is_elastic),
    Constraint("checkpoint.keep_every", "must be a multiple of checkpoint.interval",
            lambda config: config.checkpoint.keep_every % config.checkpoint.interval != 0),
    Constraint("checkpoint.keep_every",
            "has no effect with checkpoint.keep_latest_k = 0: all are kept",
            lambda config: config.checkpoint.keep_every > 0
            and config.checkpoint.keep_latest_k == 0),
    Constraint("checkpoint.max_unsaved_steps",
            'must be at least checkpoint.interval, or twice that with async_mode = "async"',
            lambda config: config.checkpoint.max_unsaved_steps is not None
            and config.checkpoint.max_unsaved_steps < config.checkpoint.interval
            * (2 if config.checkpoint.async_mode == "async" else 1)),
    Constraint("numerics.on_spike", '"rollback" requires checkpoint.enable',
            lambda config: config.numerics.on_spike == "rollback"
            and not config.checkpoint.enable),
    _only_with("numerics.max_skipped", 'numerics.on_nonfinite = "skip"',
               lambda config: config.numerics.on_nonfinite == "skip"),
    Constraint("numerics.spike_sigmas",
            'has no effect, like spike_window and max_rollbacks, unless on_spike = "rollback"',
            lambda config: config.numerics.on_spike != "rollback"
            and is_set(config.numerics, "spike_sigmas", "spike_window", "max_rollbacks")),
    _only_with("profiling.trace_freq", "enable_trace or enable_memory_snapshot is true",
               lambda config: is_set(config.profiling, "enable_trace", "enable_memory_snapshot")),
    Constraint("profiling.trace_freq", "must be at most training.steps, or nothing is traced",
            lambda config: is_set(config.profiling, "enable_trace", "enable_memory_snapshot")
            and config.profiling.trace_freq > config.training.steps),
    Constraint("lr_scheduler.total_steps",
            "must be at least training.steps: to extend a run, raise both",
            _trains_past_total_steps),
    Constraint("data.sources",
            f"data.source, {', '.join(ONE_SOURCE)} have no effect when it is set",
            lambda config: len(config.data.sources) > 0
            and is_set(config.data, "source", *ONE_SOURCE)),
    Constraint("data.sources", "two sources have the same name: give each its own",
            lambda config: len(_shared_labels(config.data.mixture)) > 0,
            lambda config: ", ".join(_shared_labels(config.data.mixture))),
    Constraint("data.sources", "two sources read the same documents: add their weights",
            lambda config: len(_shared_documents(config.data.mixture)) > 0,
            lambda config: ", ".join(_shared_documents(config.data.mixture))),
    Constraint("job.output_dir", "must be a folder of the file system, not a URL",
            lambda config: is_url(config.job.output_dir)),
    Constraint("data.path", "must be set for the sources files, text, tokens and huggingface",
            _only_source(_lacks_path)),
    Constraint("data.path", "has no effect for the sources builtin and c4",
            _only_source(_has_no_path)),
    Constraint("data.subset", "has no effect unless the source is huggingface",
            _only_source(_has_no_subset)),
    Constraint("data.revision", "has no effect unless the source is c4 or huggingface",
            _only_source(_has_no_revision)),
    Constraint("data.text_key", "has no effect unless the source is files or huggingface",
            _only_source(_has_no_text_key)),
    Constraint("data.args", "has no effect unless the source is module:attribute",
            _only_source(_has_no_args)),
    *(_any_of(key, reason, violated) for key in LISTS for reason, violated in SOURCE_RULES),
    _only_with("data.max_bad_records", 'data.on_bad_record = "skip"',
               lambda config: config.data.on_bad_record == "skip"),
    Constraint("metrics.trackers", "names a tracker twice",
            lambda config: len(set(config.metrics.trackers)) < len(config.metrics.trackers)),
    _only_with("metrics.project", "metrics.trackers has wandb, mlflow or trackio",
               lambda config: bool({"wandb", "mlflow", "trackio"} & {*config.metrics.trackers})),
    Constraint("data.validation_percent",
            "must be greater than 0 with validation.enable, unless there are validation.sources",
            lambda config: config.validation.enable and not config.validation.sources
            and not all(source.is_on_hub for source in config.data.mixture)
            and config.data.validation_percent == 0),
    Constraint("validation.sample_prompts",
            "validation.sample_prompt has no effect when it is set",
            lambda config: len(config.validation.sample_prompts) > 0
            and is_set(config.validation, "sample_prompt")),
    Constraint("validation.sources", "has no effect without validation.enable",
            lambda config: len(config.validation.sources) > 0 and not config.validation.enable),
    Constraint("validation.sources", "two sources have the same name: give each its own",
            lambda config: len(_shared_labels(config.validation.sources)) > 0,
            lambda config: ", ".join(_shared_labels(config.validation.sources))),
    Constraint("validation.sources", "two sources read the same documents",
            lambda config: len(_shared_documents(config.validation.sources)) > 0,
            lambda config: ", ".join(_shared_documents(config.validation.sources))),
    _any_of("validation.sources", "split has no effect unless the type is c4 or huggingface",
            lambda source: not source.is_on_hub and source.split != "validation"),
    _any_of("validation.sources",
            "exclude_from_training has no effect unless the type is files, text or tokens",
            lambda source: source.exclude_from_training
            and source.type not in ("files", "text", "tokens")),
)  # fmt: skip
