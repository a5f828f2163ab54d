"""What cannot be run, and why: one table, checked before any process group or device is touched.

The table in ``docs/support.md`` is generated from this one: ``python -m tools.support_table``.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

from config import ConfigError
from config.job_config import (
    DataSource,
    Experts,
    Float8,
    JobConfig,
)
from parallelisms.parallel_dims import Degrees, resolve_degrees, sequence_multiple
from parallelisms.pipeline_parallel import stages_per_rank
from runtime.compat import has_float8


class ModelShape(Protocol):
    """The sizes of a model that parallelisms must divide."""

    @property
    def n_layers(self) -> int: ...
    @property
    def n_heads(self) -> int: ...
    @property
    def n_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def hidden_dim(self) -> int: ...


@dataclass(frozen=True)
class Run:
    config: JobConfig
    shape: ModelShape
    degrees: Degrees
    has_gpu: bool


@dataclass(frozen=True)
class Refusal:
    key: str
    """What the user has to change."""
    reason: str
    applies: Callable[[Run], bool]


def check_support(
    config: JobConfig, shape: ModelShape, world_size: int, *, has_gpu: bool
) -> Degrees:
    """The degrees of this run; raise ``ConfigError`` with every refusal that applies."""
    try:
        degrees = resolve_degrees(config.parallelism, world_size)
    except ValueError as error:
        raise ConfigError([str(error)]) from None
    run = Run(config, shape, degrees, has_gpu)
    refused = [f"{row.key}: {row.reason}" for row in REFUSALS if row.applies(run)]
    if refused:
        raise ConfigError(refused)
    return degrees


def _is_set(run: Run, section: str, *keys: str) -> bool:
    """Whether one of these keys is not what it is when absent."""
    own = getattr(run.config, section)
    return any(getattr(own, key) != getattr(type(own)(), key) for key in keys)


def _tp_splits(size: Callable[[Run], int]) -> Callable[[Run], bool]:
    return lambda run: size(run) % run.degrees.tp != 0


def _key_heads(run: Run) -> int:
    """Of gated delta nets; 0 where there are none."""
    return getattr(run.shape, "n_key_heads", 0)


def _deals_out_heads(run: Run) -> bool:
    cp, tp = run.degrees.cp, run.degrees.tp
    heads, values = _key_heads(run) // tp or 1, getattr(run.shape, "n_value_heads", 0) // tp
    return heads % cp == 0 or (cp % heads == 0 and values % cp == 0)


def _ep(run: Run) -> int:
    return run.config.parallelism.expert_parallel_degree


def _has_experts(run: Run) -> bool:
    return getattr(run.shape, "n_experts", 0) > 0


def _has_expert_mesh(run: Run) -> bool:
    return _has_experts(run) and _ep(run) * run.degrees.tp > 1


def _has_zero_bubble(run: Run) -> bool:
    schedule = run.config.parallelism.pipeline_parallel_schedule
    return run.degrees.pp > 1 and schedule == "InterleavedZeroBubble"


def _stages(run: Run) -> int:
    return run.degrees.pp * stages_per_rank(run.config.parallelism)


def _pipeline_microbatches(run: Run) -> float:
    rows = _microbatches(run) * run.config.training.local_batch_size
    return rows / run.config.parallelism.pipeline_parallel_microbatch_size


def _any_source(applies: Callable[[DataSource], bool]) -> Callable[[Run], bool]:
    return lambda run: any(applies(source) for source in run.config.data.mixture)


def _batch_size(run: Run) -> int:
    training = run.config.training
    return training.global_batch_size or training.local_batch_size * run.degrees.batch


def _microbatches(run: Run) -> float:
    return _batch_size(run) / (run.config.training.local_batch_size * run.degrees.batch)


def _ramp(run: Run) -> list[int]:
    return [phase.global_batch_size for phase in run.config.training.batch_size_ramp]


def _in_ramp(applies: Callable[[Run], bool]) -> Callable[[Run], bool]:
    """Whether it would apply if a size of the ramp were training.global_batch_size."""

    def any_applies(run: Run) -> bool:
        training = run.config.training
        sizes = [training.model_copy(update={"global_batch_size": n}) for n in _ramp(run)]
        configs = [run.config.model_copy(update={"training": section}) for section in sizes]
        return any(applies(replace(run, config=config)) for config in configs)

    return any_applies


def _is_horizon_passed(run: Run) -> bool:
    total = run.config.lr_scheduler.total_steps
    return total is not None and total < run.config.training.steps


def _is_ddp(run: Run) -> bool:
    return run.config.parallelism.data_parallel == "ddp"


def _is_simple_fsdp(run: Run) -> bool:
    return run.config.parallelism.data_parallel == "simple_fsdp"


def _is_not_fsdp2(run: Run) -> bool:
    return run.config.parallelism.data_parallel != "fsdp2"


def _is_elastic(run: Run) -> bool:
    return run.config.debug.determinism == "elastic"


def _is_float8(run: Run) -> bool:
    return run.config.float8.recipe != "none"


def _tokens_of_product(run: Run) -> int:
    rows = run.config.training.local_batch_size
    if run.degrees.pp > 1:
        rows = run.config.parallelism.pipeline_parallel_microbatch_size
    return rows * run.config.training.seq_len // run.degrees.cp


def _has_budget(run: Run) -> bool:
    return run.config.activation_checkpoint.mode == "memory_budget"


def _has_muon(run: Run) -> bool:
    return run.config.optimizer.name == "muon"


def _has_short_moments(run: Run) -> bool:
    return run.config.optimizer.state_dtype == "bfloat16"


def _is_power_of_two(count: float) -> bool:
    return math.log2(count).is_integer()


def _is_reshard_group_uneven(run: Run) -> bool:
    group = run.config.parallelism.fsdp_reshard_after_forward
    shards = run.degrees.dp_shard * run.degrees.cp
    return isinstance(group, int) and (group in (1, shards) or shards % group != 0)


def _compiles_whole_recomputation(run: Run) -> bool:
    recompute = run.config.activation_checkpoint
    is_whole = recompute.mode == "full" or isinstance(recompute.selective, int)
    has_dtensors = run.degrees.tp > 1 or _is_simple_fsdp(run)
    return run.config.compile.enable and is_whole and has_dtensors


PIPELINE_KEYS = (
    "pipeline_parallel_schedule",
    "pipeline_parallel_microbatch_size",
    "pipeline_parallel_stages_per_rank",
    "pipeline_parallel_first_stage_less_layers",
    "pipeline_parallel_last_stage_less_layers",
)
# In bfloat16 a moment that no gradient adds to still decays then, whatever its value: a step of its
# values is up to 2**-7 of them, and less than half a step is rounded away.
MAX_BFLOAT16_DECAY = 1 - 2**-8
SHORT_MOMENTS = (
    " with optimizer.state_dtype bfloat16, which rounds away what a moment would lose in a step"
)
REFUSALS: tuple[Refusal, ...] = (
    Refusal("parallelism.data_parallel_shard_degree", "ddp does not shard",
            lambda run: _is_ddp(run)
            and run.config.parallelism.data_parallel_shard_degree not in (-1, 1)),
    Refusal("parallelism.data_parallel_replicate_degree",
            "with ddp, the ranks that are left hold copies: leave it out or name their number",
            lambda run: _is_ddp(run) and run.config.parallelism.data_parallel_replicate_degree
            not in (1, run.degrees.dp_replicate)),
    Refusal("parallelism.fsdp_reshard_after_forward", "does nothing with ddp",
            lambda run: _is_ddp(run)
            and _is_set(run, "parallelism", "fsdp_reshard_after_forward")),
    Refusal("parallelism.fsdp_reshard_after_forward", "simple_fsdp knows default and never",
            lambda run: _is_simple_fsdp(run)
            and run.config.parallelism.fsdp_reshard_after_forward not in ("default", "never")),
    Refusal("parallelism.fsdp_reshard_after_forward",
            "simple_fsdp gathers again what it recomputes: never needs activation_checkpoint none",
            lambda run: _is_simple_fsdp(run)
            and run.config.parallelism.fsdp_reshard_after_forward == "never"
            and run.config.activation_checkpoint.mode != "none"),
    Refusal("parallelism.fsdp_reshard_after_forward",
            "an integer must divide the sharding ranks, and be neither 1 nor all of them",
            _is_reshard_group_uneven),
    # Its groups would be made by some of the ranks, and the others would be waited for.
    Refusal("parallelism.fsdp_reshard_after_forward",
            "an integer does not go with tensor or pipeline parallelism",
            lambda run: isinstance(run.config.parallelism.fsdp_reshard_after_forward, int)
            and run.degrees.tp * run.degrees.pp > 1),
    Refusal("parallelism.fsdp_reduce_gradients",
            "needs fsdp2: ddp reduces after the last microbatch, simple_fsdp after each",
            lambda run: _is_not_fsdp2(run)
            and _is_set(run, "parallelism", "fsdp_reduce_gradients")),
    Refusal("parallelism.fsdp_forward_prefetch", "needs fsdp2",
            lambda run: _is_not_fsdp2(run)
            and _is_set(run, "parallelism", "fsdp_forward_prefetch")),
    Refusal("parallelism.fsdp_backward_prefetch", "needs fsdp2",
            lambda run: _is_not_fsdp2(run)
            and _is_set(run, "parallelism", "fsdp_backward_prefetch")),
    Refusal("parallelism.fsdp_backward_prefetch",
            "does nothing with fsdp_reshard_after_forward never, and in a pipeline unless always",
            lambda run: run.config.parallelism.fsdp_backward_prefetch > 0
            and run.config.parallelism.fsdp_reshard_after_forward
            in (("never",) if run.degrees.pp == 1 else ("never", "default"))),
    Refusal("parallelism.fsdp_reduce_gradients", "does nothing with one microbatch per step",
            lambda run: _microbatches(run) == 1 and run.degrees.pp == 1
            and _is_set(run, "parallelism", "fsdp_reduce_gradients")),
    Refusal("parallelism.fsdp_cpu_offload", "needs fsdp2",
            lambda run: _is_not_fsdp2(run) and run.config.parallelism.fsdp_cpu_offload),
    Refusal("parallelism.fsdp_cpu_offload", "needs a GPU to offload from",
            lambda run: run.config.parallelism.fsdp_cpu_offload and not run.has_gpu),
    Refusal("experts.balance_loss", "the model has no experts: nor does balance_bias_rate matter",
            lambda run: not _has_experts(run) and run.config.experts != Experts()),
    Refusal("debug.determinism", "elastic is proved for models without experts only",
            lambda run: _has_experts(run) and _is_elastic(run)),
    Refusal("parallelism.expert_parallel_degree", "the model has no experts",
            lambda run: _ep(run) > 1 and not _has_experts(run)),
    Refusal("parallelism.expert_parallel_degree", "must divide the model's n_experts",
            lambda run: _has_experts(run) and getattr(run.shape, "n_experts", 0) % _ep(run) != 0),
    Refusal("parallelism.expert_parallel_degree",
            "must divide data_parallel_shard_degree * context_ * tensor_parallel_degree",
            lambda run: _has_experts(run) and run.degrees.dp_shard * run.degrees.cp
            * run.degrees.tp % _ep(run) != 0),
    Refusal("parallelism.data_parallel",
            "experts with expert or tensor parallel are on a mesh of their own: it needs fsdp2",
            lambda run: _has_expert_mesh(run) and _is_not_fsdp2(run)),
    Refusal("parallelism.fsdp_reshard_after_forward",
            "an integer does not go with expert parallel",
            lambda run: _has_expert_mesh(run)
            and isinstance(run.config.parallelism.fsdp_reshard_after_forward, int)),
    Refusal("parallelism.fsdp_forward_prefetch",
            "like fsdp_backward_prefetch, knows nothing of experts on a mesh of their own",
            lambda run: _has_expert_mesh(run)
            and _is_set(run, "parallelism", "fsdp_forward_prefetch", "fsdp_backward_prefetch")),
    Refusal("metrics.straggler_window",
            "experts get unequal numbers of tokens, and ranks wait for them in every layer",
            lambda run: _ep(run) > 1 and run.config.metrics.straggler_window > 0),
    Refusal("parallelism.tensor_parallel_degree", "must divide the model's n_heads",
            _tp_splits(lambda run: run.shape.n_heads)),
    # Fewer heads than ranks are gathered where they are needed.
    Refusal("parallelism.tensor_parallel_degree", "must divide the model's n_kv_heads * head_dim",
            _tp_splits(lambda run: run.shape.n_kv_heads * run.shape.head_dim)),
    # Experts are not cut.
    Refusal("parallelism.tensor_parallel_degree", "must divide the model's hidden_dim",
            _tp_splits(lambda run: 0 if _has_experts(run) else run.shape.hidden_dim)),
    # Absent, the vocabulary is a multiple of 64.
    Refusal("parallelism.tensor_parallel_degree", "must divide model.vocab_size",
            _tp_splits(lambda run: run.config.model.vocab_size or 64)),
    Refusal("training.seq_len",
            "must be a multiple of tensor_parallel_degree * context_parallel_degree, of twice that"
            " with context_parallel_method allgather",
            lambda run: run.config.training.seq_len
            % sequence_multiple(run.degrees, run.config.parallelism.context_parallel_method) != 0),
    Refusal("parallelism.tensor_parallel_async", "does nothing without tensor_parallel_degree",
            lambda run: run.config.parallelism.tensor_parallel_async and run.degrees.tp == 1),
    Refusal("parallelism.tensor_parallel_async", "needs GPUs",
            lambda run: run.config.parallelism.tensor_parallel_async and not run.has_gpu),
    Refusal("parallelism.tensor_parallel_async",
            "the compiler does it: it needs compile.enable and compile.backend inductor",
            lambda run: run.config.parallelism.tensor_parallel_async
            and not (run.config.compile.enable and run.config.compile.backend == "inductor")),
    Refusal("parallelism.context_parallel_method", "does nothing without context_parallel_degree",
            lambda run: run.degrees.cp == 1
            and _is_set(run, "parallelism", "context_parallel_method")),
    Refusal("parallelism.context_parallel_method",
            "ulysses deals out heads: context_parallel_degree * tensor_parallel_degree must divide"
            " the model's n_heads; allgather does not mind",
            lambda run: run.config.parallelism.context_parallel_method == "ulysses"
            and run.shape.n_heads % (run.degrees.cp * run.degrees.tp) != 0
            and run.degrees.cp > 1),
    Refusal("parallelism.tensor_parallel_degree", "must divide the model's n_key_heads",
            _tp_splits(_key_heads)),
    Refusal("parallelism.context_parallel_degree",
            "gated delta nets are dealt out by heads: it must divide the n_key_heads of a tensor"
            " parallel rank, or be a multiple of them that divides its n_value_heads",
            lambda run: _key_heads(run) > 0 and not _deals_out_heads(run)),
    Refusal("parallelism.pipeline_parallel_degree", "more stages than the model has layers",
            lambda run: run.degrees.pp > 1 and _stages(run) > run.shape.n_layers),
    Refusal("parallelism.pipeline_parallel_schedule",
            "does nothing, like pipeline_parallel_microbatch_size, _stages_per_rank and"
            " _less_layers, without pipeline_parallel_degree",
            lambda run: run.degrees.pp == 1 and _is_set(run, "parallelism", *PIPELINE_KEYS)),
    Refusal("parallelism.pipeline_parallel_stages_per_rank", "needs an interleaved schedule",
            lambda run: run.degrees.pp > 1 and stages_per_rank(run.config.parallelism) == 1
            and _is_set(run, "parallelism", "pipeline_parallel_stages_per_rank")),
    Refusal("parallelism.pipeline_parallel_microbatch_size",
            "must divide training.local_batch_size",
            lambda run: run.degrees.pp > 1 and run.config.training.local_batch_size
            % run.config.parallelism.pipeline_parallel_microbatch_size != 0),
    Refusal("training.global_batch_size",
            "1F1B needs at least as many microbatches on each rank as the pipeline has stages",
            lambda run: run.degrees.pp > 1 and _pipeline_microbatches(run) < _stages(run)
            and run.config.parallelism.pipeline_parallel_schedule == "1F1B"),
    Refusal("training.global_batch_size",
            "interleaved schedules need a multiple of pipeline_parallel_degree microbatches",
            lambda run: run.degrees.pp > 1 and stages_per_rank(run.config.parallelism) > 1
            and _pipeline_microbatches(run) % run.degrees.pp != 0),
    Refusal("parallelism.fsdp_reshard_after_forward",
            "simple_fsdp would keep a copy of the weights for each microbatch in a pipeline",
            lambda run: run.degrees.pp > 1 and _is_simple_fsdp(run)
            and run.config.parallelism.fsdp_reshard_after_forward == "never"),
    Refusal("parallelism.fsdp_forward_prefetch",
            "an interleaved pipeline gathers whole stages",
            lambda run: run.degrees.pp > 1 and stages_per_rank(run.config.parallelism) > 1
            and run.config.parallelism.fsdp_forward_prefetch > 0),
    # Freed weights are not the ones that the halves of backward look for: gradients would be lost.
    Refusal("parallelism.pipeline_parallel_schedule",
            "zero bubble loses the gradients of weights that are freed:"
            " fsdp_reshard_after_forward must be default or never",
            lambda run: _has_zero_bubble(run) and run.config.parallelism.fsdp_reshard_after_forward
            not in ("default", "never")),
    Refusal("parallelism.pipeline_parallel_schedule",
            "zero bubble splits backward in two, which compiled blocks cannot",
            lambda run: _has_zero_bubble(run) and run.config.compile.enable),
    Refusal("parallelism.pipeline_parallel_schedule",
            "zero bubble would recompute twice: it needs activation_checkpoint.mode none, and"
            " simple_fsdp recomputes to free weights",
            lambda run: _has_zero_bubble(run)
            and (run.config.activation_checkpoint.mode != "none" or _is_simple_fsdp(run))),
    Refusal("training.global_batch_size",
            "must be a multiple of training.local_batch_size times the data-parallel ranks",
            lambda run: not _microbatches(run).is_integer()),
    Refusal("training.batch_size_ramp",
            "sizes must grow from phase to phase, and from the last to training.global_batch_size",
            lambda run: any(a >= b for a, b in pairwise([*_ramp(run), _batch_size(run)]))),
    Refusal("parallelism.data_parallel",
            "debug.determinism elastic needs fsdp2, whose reduction it replaces",
            lambda run: _is_elastic(run) and _is_not_fsdp2(run)),
    Refusal("parallelism.data_parallel_replicate_degree",
            "debug.determinism elastic does not order the sum over copies",
            lambda run: _is_elastic(run) and not _is_ddp(run) and run.degrees.dp_replicate > 1),
    Refusal("parallelism.data_parallel_shard_degree",
            "debug.determinism elastic adds pairwise: it needs a power of two",
            lambda run: _is_elastic(run) and not _is_power_of_two(run.degrees.dp_shard)),
    Refusal("training.global_batch_size",
            "debug.determinism elastic adds pairwise: it needs a power of two of microbatches",
            lambda run: _is_elastic(run) and _microbatches(run).is_integer()
            and not _is_power_of_two(_microbatches(run))),
    Refusal("parallelism.fsdp_reduce_gradients",
            "debug.determinism elastic adds pairwise, last_microbatch one after the other",
            lambda run: _is_elastic(run)
            and _is_set(run, "parallelism", "fsdp_reduce_gradients")),
    Refusal("parallelism.context_parallel_degree",
            "debug.determinism elastic is proved for data and tensor parallel only",
            lambda run: _is_elastic(run) and run.degrees.cp > 1),
    Refusal("parallelism.pipeline_parallel_degree",
            "debug.determinism elastic is proved for data and tensor parallel only",
            lambda run: _is_elastic(run) and run.degrees.pp > 1),
    Refusal("parallelism.expert_parallel_degree",
            "debug.determinism elastic is proved for data and tensor parallel only",
            lambda run: _is_elastic(run) and run.config.parallelism.expert_parallel_degree > 1),
    Refusal("optimizer.muon_momentum", "does nothing unless optimizer.name is muon",
            lambda run: not _has_muon(run)
            and _is_set(run, "optimizer", "muon_momentum")),
    Refusal("optimizer.muon_momentum", f"must be at most 0.99609375{SHORT_MOMENTS}",
            lambda run: _has_short_moments(run)
            and run.config.optimizer.muon_momentum > MAX_BFLOAT16_DECAY),
    Refusal("parallelism.fsdp_cpu_offload",
            "optimizer.name muon would multiply its matrices on the host",
            lambda run: _has_muon(run) and run.config.parallelism.fsdp_cpu_offload),
    Refusal("optimizer.name", "debug.determinism elastic is proved for adamw only",
            lambda run: _has_muon(run) and _is_elastic(run)),
    Refusal("optimizer.state_dtype", "does nothing unless training.dtype is float32",
            lambda run: run.config.training.dtype != "float32" and _has_short_moments(run)),
    Refusal("optimizer.beta1", f"must be at most 0.99609375{SHORT_MOMENTS}",
            lambda run: _has_short_moments(run)
            and run.config.optimizer.beta1 > MAX_BFLOAT16_DECAY),
    Refusal("optimizer.beta2", f"must be at most 0.99609375{SHORT_MOMENTS}",
            lambda run: _has_short_moments(run)
            and run.config.optimizer.beta2 > MAX_BFLOAT16_DECAY),
    Refusal("training.mixed_precision_param", "does nothing unless training.dtype is float32",
            lambda run: run.config.training.dtype != "float32"
            and _is_set(run, "training", "mixed_precision_param")),
    Refusal("training.mixed_precision_reduce", "does nothing unless training.dtype is float32",
            lambda run: run.config.training.dtype != "float32"
            and _is_set(run, "training", "mixed_precision_reduce")),
    Refusal("training.mixed_precision_output", "does nothing unless training.dtype is float32",
            lambda run: run.config.training.dtype != "float32"
            and _is_set(run, "training", "mixed_precision_output")),
    Refusal("activation_checkpoint.selective",
            "does nothing unless activation_checkpoint.mode is selective",
            lambda run: run.config.activation_checkpoint.mode != "selective"
            and _is_set(run, "activation_checkpoint", "selective")),
    Refusal("activation_checkpoint.memory_budget",
            "does nothing unless activation_checkpoint.mode is memory_budget",
            lambda run: not _has_budget(run)
            and _is_set(run, "activation_checkpoint", "memory_budget")),
    Refusal("activation_checkpoint.mode",
            "memory_budget is kept by the compiler: it needs compile.enable, and compile.backend"
            " inductor or aot_eager_decomp_partition",
            lambda run: _has_budget(run) and not (run.config.compile.enable
            and run.config.compile.backend in ("inductor", "aot_eager_decomp_partition"))),
    Refusal("activation_checkpoint.mode",
            "memory_budget cannot free the weights that simple_fsdp gathers",
            lambda run: _has_budget(run) and _is_simple_fsdp(run)),
    Refusal("parallelism.tensor_parallel_degree",
            "with memory_budget PyTorch 2.13 wants to know how large a mesh is, and cannot",
            lambda run: _has_budget(run) and run.degrees.tp > 1),
    # It saves attention's random state and the mesh for backward, and then takes one for the other.
    Refusal("activation_checkpoint.mode",
            "without a GPU, PyTorch 2.13 cannot compile blocks that are recomputed as a whole with"
            " tensor parallel or simple_fsdp",
            lambda run: _compiles_whole_recomputation(run) and not run.has_gpu),
    Refusal("profiling.enable_memory_snapshot", "needs a CUDA device",
            lambda run: run.config.profiling.enable_memory_snapshot and not run.has_gpu),
    Refusal("compile.backend", "does nothing without compile.enable",
            lambda run: not run.config.compile.enable and _is_set(run, "compile", "backend")),
    Refusal("float8.recipe", "none: float8.skip, skip_small and emulate do nothing",
            lambda run: not _is_float8(run) and run.config.float8 != Float8()),
    Refusal("float8.recipe",
            "needs a GPU of CUDA capability 8.9 or more; float8.emulate is for tests elsewhere",
            lambda run: _is_float8(run) and not run.config.float8.emulate
            and not (run.has_gpu and has_float8())),
    Refusal("float8.recipe",
            "the hardware multiplies bfloat16 that was made float8: training.dtype and"
            " mixed_precision_param may not ask for more, but with float8.emulate",
            lambda run: _is_float8(run) and not run.config.float8.emulate
            and (run.config.training.dtype == "float64"
                 or run.config.training.mixed_precision_param == "float32")),
    Refusal("parallelism.tensor_parallel_degree",
            "float8 makes its scales of whole matrices, which tensor parallel ranks do not have",
            lambda run: _is_float8(run) and run.degrees.tp > 1),
    Refusal("parallelism.pipeline_parallel_schedule",
            "zero bubble splits backward in two, and float8 would do all of it in both",
            lambda run: _is_float8(run) and _has_zero_bubble(run)),
    Refusal("debug.determinism", "elastic is not proved for float8",
            lambda run: _is_float8(run) and _is_elastic(run)),
    Refusal("training.seq_len",
            "float8 multiplies by 16 tokens: a rank's part of a microbatch must be a multiple",
            lambda run: _is_float8(run) and _tokens_of_product(run) % 16 != 0),
    Refusal("checkpoint.keep_every", "must be a multiple of checkpoint.interval",
            lambda run: run.config.checkpoint.keep_every % run.config.checkpoint.interval != 0),
    Refusal("checkpoint.keep_every", "does nothing where checkpoint.keep_latest_k is 0: all stay",
            lambda run: run.config.checkpoint.keep_every > 0
            and run.config.checkpoint.keep_latest_k == 0),
    Refusal("checkpoint.max_unsaved_steps",
            "must be at least checkpoint.interval; twice that with async_mode async",
            lambda run: run.config.checkpoint.max_unsaved_steps is not None
            and run.config.checkpoint.max_unsaved_steps < run.config.checkpoint.interval
            * (2 if run.config.checkpoint.async_mode == "async" else 1)),
    Refusal("numerics.on_spike", "rollback goes to a checkpoint: it needs checkpoint.enable",
            lambda run: run.config.numerics.on_spike == "rollback"
            and not run.config.checkpoint.enable),
    Refusal("numerics.max_skipped", "does nothing unless numerics.on_nonfinite is skip",
            lambda run: run.config.numerics.on_nonfinite != "skip"
            and _is_set(run, "numerics", "max_skipped")),
    Refusal("numerics.spike_sigmas",
            "does nothing, like spike_window and max_rollbacks, unless on_spike is rollback",
            lambda run: run.config.numerics.on_spike != "rollback"
            and _is_set(run, "numerics", "spike_sigmas", "spike_window", "max_rollbacks")),
    Refusal("metrics.straggler_window",
            "simple_fsdp gathers weights inside the blocks: their times say nothing",
            lambda run: _is_simple_fsdp(run) and run.config.metrics.straggler_window > 0),
    Refusal("metrics.straggler_window",
            "compares ranks that do not wait for each other in every layer, as those of tensor and"
            " context parallelism do: it needs more than one",
            lambda run: run.config.metrics.straggler_window > 0
            and run.degrees.pp * run.degrees.batch == 1),
    Refusal("lr_scheduler.total_steps",
            "must not be less than training.steps: where it is given, a longer run needs both",
            _is_horizon_passed),
    Refusal("data.sources", "data.source, path, subset and text_key do nothing beside it",
            lambda run: len(run.config.data.sources) > 0
            and _is_set(run, "data", "source", "path", "subset", "text_key")),
    Refusal("data.sources", "two are called the same: give each a name",
            lambda run: len({s.label for s in run.config.data.mixture})
            < len(run.config.data.mixture)),
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
    Refusal("data.max_bad_records", "does nothing unless data.on_bad_record is skip",
            lambda run: run.config.data.on_bad_record != "skip"
            and _is_set(run, "data", "max_bad_records")),
    Refusal("data.validation_percent", "must be more than 0 for validation.enable",
            lambda run: run.config.validation.enable
            and any(s.type in ("builtin", "files", "tokens") for s in run.config.data.mixture)
            and run.config.data.validation_percent == 0),
)  # fmt: skip
# What the batch size must be, each of the ramp must be.
REFUSALS += tuple(
    Refusal("training.batch_size_ramp", f"each size: {row.reason}", _in_ramp(row.applies))
    for row in REFUSALS
    if row.key == "training.global_batch_size"
)
