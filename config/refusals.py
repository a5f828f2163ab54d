"""Keys that contradict or disable each other, whatever the number of ranks and the hardware.

What depends on ranks or hardware is in ``parallelisms/support.py``, which checks both tables.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic import BaseModel

from config.job_config import DataSource, Float8, JobConfig

T = TypeVar("T")
# The largest decay at which a bfloat16 moment still shrinks when its gradient is 0: neighbouring
# values differ by up to 2**-7 of them, and a change of less than half of that is rounded away.
MAX_BFLOAT16_DECAY = 1 - 2**-8
SHORT_MOMENTS = (
    " with optimizer.state_dtype bfloat16, which rounds away what a moment would lose in a step"
)


@dataclass(frozen=True)
class Refusal(Generic[T]):
    key: str
    """What the user has to change."""
    reason: str
    applies: Callable[[T], bool]
    seen: Callable[[T], str] | None = None
    """What in this run does not fit; the message shows it."""

    def message(self, run: T) -> str:
        seen = f" ({self.seen(run)})" if self.seen is not None else ""
        return f"{self.key}: {self.reason}{seen}"


def is_set(section: BaseModel, *keys: str) -> bool:
    """Whether any of these keys differs from its default."""
    return any(getattr(section, key) != getattr(type(section)(), key) for key in keys)


def _only_with(key: str, needs: str, is_met: Callable[[JobConfig], bool]) -> Refusal[JobConfig]:
    section, name = key.split(".")
    return Refusal(
        key,
        f"does nothing unless {needs}",
        lambda config: not is_met(config) and is_set(getattr(config, section), name),
    )


def _any_source(applies: Callable[[DataSource], bool]) -> Callable[[JobConfig], bool]:
    return lambda config: any(applies(source) for source in config.data.mixture)


def _shared_labels(config: JobConfig) -> list[str]:
    counts = Counter(source.label for source in config.data.mixture)
    return [label for label, count in counts.items() if count > 1]


def _is_horizon_passed(config: JobConfig) -> bool:
    total = config.lr_scheduler.total_steps
    return total is not None and total < config.training.steps


def is_float8(config: JobConfig) -> bool:
    return config.float8.recipe != "none"


def has_budget(config: JobConfig) -> bool:
    return config.activation_checkpoint.mode == "memory_budget"


def _has_muon(config: JobConfig) -> bool:
    return config.optimizer.name == "muon"


def _has_short_moments(config: JobConfig) -> bool:
    return config.optimizer.state_dtype == "bfloat16"


def _is_mixed(config: JobConfig) -> bool:
    """Whether compute may have another dtype than the weights."""
    return config.training.dtype == "float32"


REFUSALS: tuple[Refusal[JobConfig], ...] = (
    _only_with("optimizer.muon_momentum", "optimizer.name is muon", _has_muon),
    Refusal("optimizer.muon_momentum", f"must be at most 0.99609375{SHORT_MOMENTS}",
            lambda config: _has_short_moments(config)
            and config.optimizer.muon_momentum > MAX_BFLOAT16_DECAY),
    Refusal("optimizer.name", "debug.determinism elastic is proved for adamw only",
            lambda config: _has_muon(config) and config.debug.is_elastic),
    _only_with("optimizer.state_dtype", "training.dtype is float32", _is_mixed),
    Refusal("optimizer.beta1", f"must be at most 0.99609375{SHORT_MOMENTS}",
            lambda config: _has_short_moments(config)
            and config.optimizer.beta1 > MAX_BFLOAT16_DECAY),
    Refusal("optimizer.beta2", f"must be at most 0.99609375{SHORT_MOMENTS}",
            lambda config: _has_short_moments(config)
            and config.optimizer.beta2 > MAX_BFLOAT16_DECAY),
    _only_with("training.mixed_precision_param", "training.dtype is float32", _is_mixed),
    _only_with("training.mixed_precision_reduce", "training.dtype is float32", _is_mixed),
    _only_with("activation_checkpoint.selective", "activation_checkpoint.mode is selective",
               lambda config: config.activation_checkpoint.mode == "selective"),
    _only_with("activation_checkpoint.memory_budget",
               "activation_checkpoint.mode is memory_budget", has_budget),
    Refusal("activation_checkpoint.mode",
            "memory_budget is kept by the compiler: it needs compile.enable, and compile.backend"
            " inductor or aot_eager_decomp_partition",
            lambda config: has_budget(config) and not (config.compile.enable
            and config.compile.backend in ("inductor", "aot_eager_decomp_partition"))),
    Refusal("compile.backend", "does nothing without compile.enable",
            lambda config: not config.compile.enable and is_set(config.compile, "backend")),
    Refusal("float8.recipe", "none: float8.skip, skip_small and emulate do nothing",
            lambda config: not is_float8(config) and config.float8 != Float8()),
    Refusal("float8.recipe",
            "the hardware multiplies bfloat16 that was made float8: training.dtype and"
            " mixed_precision_param may not ask for more, but with float8.emulate",
            lambda config: is_float8(config) and not config.float8.emulate
            and (config.training.dtype == "float64"
                 or config.training.mixed_precision_param == "float32")),
    Refusal("debug.determinism", "elastic is not proved for float8",
            lambda config: is_float8(config) and config.debug.is_elastic),
    Refusal("checkpoint.keep_every", "must be a multiple of checkpoint.interval",
            lambda config: config.checkpoint.keep_every % config.checkpoint.interval != 0),
    Refusal("checkpoint.keep_every", "does nothing where checkpoint.keep_latest_k is 0: all stay",
            lambda config: config.checkpoint.keep_every > 0
            and config.checkpoint.keep_latest_k == 0),
    Refusal("checkpoint.max_unsaved_steps",
            "must be at least checkpoint.interval; twice that with async_mode async",
            lambda config: config.checkpoint.max_unsaved_steps is not None
            and config.checkpoint.max_unsaved_steps < config.checkpoint.interval
            * (2 if config.checkpoint.async_mode == "async" else 1)),
    Refusal("numerics.on_spike", "rollback goes to a checkpoint: it needs checkpoint.enable",
            lambda config: config.numerics.on_spike == "rollback"
            and not config.checkpoint.enable),
    _only_with("numerics.max_skipped", "numerics.on_nonfinite is skip",
               lambda config: config.numerics.on_nonfinite == "skip"),
    Refusal("numerics.spike_sigmas",
            "does nothing, like spike_window and max_rollbacks, unless on_spike is rollback",
            lambda config: config.numerics.on_spike != "rollback"
            and is_set(config.numerics, "spike_sigmas", "spike_window", "max_rollbacks")),
    Refusal("lr_scheduler.total_steps",
            "must not be less than training.steps: where it is given, a longer run needs both",
            _is_horizon_passed),
    Refusal("data.sources", "data.source, path, subset and text_key do nothing beside it",
            lambda config: len(config.data.sources) > 0
            and is_set(config.data, "source", "path", "subset", "text_key")),
    Refusal("data.sources", "two are called the same: give each a name",
            lambda config: len(_shared_labels(config)) > 0,
            lambda config: ", ".join(_shared_labels(config))),
    Refusal("data.path", "must say what to read with files, tokens or huggingface",
            _any_source(lambda source: source.type in ("files", "tokens", "huggingface")
                        and not source.path)),
    Refusal("data.path", "does nothing with builtin or c4",
            _any_source(lambda source: source.type in ("builtin", "c4") and source.path != "")),
    Refusal("data.subset", "does nothing unless the source is huggingface",
            _any_source(lambda source: source.type != "huggingface" and source.subset != "")),
    Refusal("data.text_key", "does nothing with builtin, tokens or c4",
            _any_source(lambda source: source.type in ("builtin", "tokens", "c4")
                        and source.text_key != DataSource().text_key)),
    _only_with("data.max_bad_records", "data.on_bad_record is skip",
               lambda config: config.data.on_bad_record == "skip"),
    Refusal("data.validation_percent", "must be more than 0 for validation.enable",
            lambda config: config.validation.enable
            and any(s.type in ("builtin", "files", "tokens") for s in config.data.mixture)
            and config.data.validation_percent == 0),
)  # fmt: skip
