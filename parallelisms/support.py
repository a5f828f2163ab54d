"""Which settings cannot run with this model, on these ranks or this hardware, and why.

Checked before any process group or device is touched.
``docs/support.md`` is generated from this table and the one of ``config/refusals.py``.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

from config import ConfigError, refusals
from config.job_config import Experts, JobConfig
from config.refusals import Refusal, has_budget, is_float8, is_set
from parallelisms.parallel_dims import Degrees, resolve_degrees, sequence_multiple
from parallelisms.pipeline_parallel import stages_per_rank
from runtime.machine import has_float8


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


def check_support(
    config: JobConfig, shape: ModelShape, world_size: int, *, has_gpu: bool
) -> Degrees:
    """The degrees of this run; raise ``ConfigError`` with every refusal that applies."""
    try:
        degrees = resolve_degrees(config.parallelism, world_size)
    except ValueError as error:
        raise ConfigError([str(error)]) from None
    run = Run(config, shape, degrees, has_gpu)
    found = [row.message(config) for row in refusals.REFUSALS if row.applies(config)]
    found += [row.message(run) for row in REFUSALS if row.applies(run)]
    if found:
        raise ConfigError(found)
    return degrees


def _tp_divides(what: str, size: Callable[[Run], int]) -> Refusal[Run]:
    return Refusal(
        "parallelism.tensor_parallel_degree",
        f"must divide {what}",
        lambda run: size(run) % run.degrees.tp != 0,
        lambda run: f"{run.degrees.tp} does not divide {size(run)}",
    )


def _key_heads(run: Run) -> int:
    """Key heads of the model's gated delta nets; 0 if it has none."""
    return getattr(run.shape, "n_key_heads", 0)


def _deals_out_heads(run: Run) -> bool:
    cp, tp = run.degrees.cp, run.degrees.tp
    heads, values = _key_heads(run) // tp or 1, getattr(run.shape, "n_value_heads", 0) // tp
    return heads % cp == 0 or (cp % heads == 0 and values % cp == 0)


def _ep(run: Run) -> int:
    return run.config.parallelism.expert_parallel_degree


def _n_experts(run: Run) -> int:
    return getattr(run.shape, "n_experts", 0)


def _has_experts(run: Run) -> bool:
    return _n_experts(run) > 0


def _expert_ranks(run: Run) -> int:
    return run.degrees.dp_shard * run.degrees.cp * run.degrees.tp


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


def _is_ddp(run: Run) -> bool:
    return run.config.parallelism.data_parallel == "ddp"


def _is_simple_fsdp(run: Run) -> bool:
    return run.config.parallelism.data_parallel == "simple_fsdp"


def _is_not_fsdp2(run: Run) -> bool:
    return run.config.parallelism.data_parallel != "fsdp2"


def _sequences_at_once(run: Run) -> int:
    if run.degrees.pp > 1:
        return run.config.parallelism.pipeline_parallel_microbatch_size
    return run.config.training.local_batch_size


def _tokens_of_product(run: Run) -> int:
    return _sequences_at_once(run) * run.config.training.seq_len // run.degrees.cp


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
REFUSALS: tuple[Refusal[Run], ...] = (
    Refusal("parallelism.data_parallel_shard_degree", "ddp does not shard",
            lambda run: _is_ddp(run)
            and run.config.parallelism.data_parallel_shard_degree not in (-1, 1)),
    Refusal("parallelism.data_parallel_replicate_degree",
            "with ddp, the ranks that are left hold copies: leave it out or name their number",
            lambda run: _is_ddp(run) and run.config.parallelism.data_parallel_replicate_degree
            not in (1, run.degrees.dp_replicate)),
    Refusal("parallelism.fsdp_reshard_after_forward", "does nothing with ddp",
            lambda run: _is_ddp(run)
            and is_set(run.config.parallelism, "fsdp_reshard_after_forward")),
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
    # Only some of the ranks would make its groups, and would wait for the others.
    Refusal("parallelism.fsdp_reshard_after_forward",
            "an integer does not go with tensor or pipeline parallelism",
            lambda run: isinstance(run.config.parallelism.fsdp_reshard_after_forward, int)
            and run.degrees.tp * run.degrees.pp > 1),
    Refusal("parallelism.fsdp_reduce_gradients",
            "needs fsdp2: ddp reduces after the last microbatch, simple_fsdp after each",
            lambda run: _is_not_fsdp2(run)
            and is_set(run.config.parallelism, "fsdp_reduce_gradients")),
    Refusal("parallelism.fsdp_forward_prefetch", "needs fsdp2",
            lambda run: _is_not_fsdp2(run)
            and is_set(run.config.parallelism, "fsdp_forward_prefetch")),
    Refusal("parallelism.fsdp_backward_prefetch", "needs fsdp2",
            lambda run: _is_not_fsdp2(run)
            and is_set(run.config.parallelism, "fsdp_backward_prefetch")),
    Refusal("parallelism.fsdp_backward_prefetch",
            "does nothing with fsdp_reshard_after_forward never, and in a pipeline unless always",
            lambda run: run.config.parallelism.fsdp_backward_prefetch > 0
            and run.config.parallelism.fsdp_reshard_after_forward
            in (("never",) if run.degrees.pp == 1 else ("never", "default"))),
    Refusal("parallelism.fsdp_reduce_gradients", "does nothing with one microbatch per step",
            lambda run: _microbatches(run) == 1 and run.degrees.pp == 1
            and is_set(run.config.parallelism, "fsdp_reduce_gradients")),
    Refusal("parallelism.fsdp_cpu_offload", "needs fsdp2",
            lambda run: _is_not_fsdp2(run) and run.config.parallelism.fsdp_cpu_offload),
    Refusal("parallelism.fsdp_cpu_offload", "needs a GPU to offload from",
            lambda run: run.config.parallelism.fsdp_cpu_offload and not run.has_gpu),
    Refusal("experts.balance_loss", "the model has no experts: nor does balance_bias_rate matter",
            lambda run: not _has_experts(run) and run.config.experts != Experts()),
    Refusal("debug.determinism", "elastic is proved for models without experts only",
            lambda run: _has_experts(run) and run.config.debug.is_elastic),
    Refusal("parallelism.expert_parallel_degree", "the model has no experts",
            lambda run: _ep(run) > 1 and not _has_experts(run)),
    Refusal("parallelism.expert_parallel_degree", "must divide the model's n_experts",
            lambda run: _n_experts(run) % _ep(run) != 0,
            lambda run: f"{_ep(run)} does not divide {_n_experts(run)}"),
    Refusal("parallelism.expert_parallel_degree",
            "must divide data_parallel_shard_degree times context_parallel_degree times"
            " tensor_parallel_degree",
            lambda run: _has_experts(run) and _expert_ranks(run) % _ep(run) != 0,
            lambda run: f"{_ep(run)} does not divide {_expert_ranks(run)}"),
    Refusal("parallelism.data_parallel",
            "experts with expert or tensor parallel are on a mesh of their own: it needs fsdp2",
            lambda run: _has_expert_mesh(run) and _is_not_fsdp2(run)),
    Refusal("parallelism.fsdp_reshard_after_forward",
            "an integer does not go with expert parallel",
            lambda run: _has_expert_mesh(run)
            and isinstance(run.config.parallelism.fsdp_reshard_after_forward, int)),
    Refusal("metrics.straggler_window",
            "experts get unequal numbers of tokens, and ranks wait for them in every layer",
            lambda run: _ep(run) > 1 and run.config.metrics.straggler_window > 0),
    _tp_divides("the model's n_heads", lambda run: run.shape.n_heads),
    # Fewer heads than ranks are gathered where they are needed.
    _tp_divides("the model's n_kv_heads * head_dim",
                lambda run: run.shape.n_kv_heads * run.shape.head_dim),
    # Tensor parallel does not cut experts.
    _tp_divides("the model's hidden_dim",
                lambda run: 0 if _has_experts(run) else run.shape.hidden_dim),
    # Absent, the vocabulary is a multiple of 64.
    _tp_divides("model.vocab_size", lambda run: run.config.model.vocab_size or 64),
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
    # By reading PyTorch 2.13's pass, and running it: of one sequence, gathers look another way.
    Refusal("parallelism.tensor_parallel_async",
            "gathers are cut only in microbatches of several sequences:"
            " training.local_batch_size or, in a pipeline, pipeline_parallel_microbatch_size",
            lambda run: run.config.parallelism.tensor_parallel_async
            and _sequences_at_once(run) == 1),
    Refusal("parallelism.context_parallel_method", "does nothing without context_parallel_degree",
            lambda run: run.degrees.cp == 1
            and is_set(run.config.parallelism, "context_parallel_method")),
    Refusal("parallelism.context_parallel_method",
            "ulysses deals out heads: context_parallel_degree * tensor_parallel_degree must divide"
            " the model's n_heads; allgather does not mind",
            lambda run: run.config.parallelism.context_parallel_method == "ulysses"
            and run.shape.n_heads % (run.degrees.cp * run.degrees.tp) != 0
            and run.degrees.cp > 1),
    _tp_divides("the model's n_key_heads", _key_heads),
    Refusal("parallelism.context_parallel_degree",
            "gated delta nets are dealt out by heads: it must divide the n_key_heads of a tensor"
            " parallel rank, or be a multiple of them that divides its n_value_heads",
            lambda run: _key_heads(run) > 0 and not _deals_out_heads(run)),
    Refusal("parallelism.pipeline_parallel_degree", "more stages than the model has layers",
            lambda run: run.degrees.pp > 1 and _stages(run) > run.shape.n_layers),
    Refusal("parallelism.pipeline_parallel_schedule",
            "does nothing, like pipeline_parallel_microbatch_size, _stages_per_rank and"
            " _less_layers, without pipeline_parallel_degree",
            lambda run: run.degrees.pp == 1 and is_set(run.config.parallelism, *PIPELINE_KEYS)),
    Refusal("parallelism.pipeline_parallel_stages_per_rank", "needs an interleaved schedule",
            lambda run: run.degrees.pp > 1 and stages_per_rank(run.config.parallelism) == 1
            and is_set(run.config.parallelism, "pipeline_parallel_stages_per_rank")),
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
            lambda run: not _microbatches(run).is_integer(),
            lambda run: f"{_batch_size(run)} is no multiple of"
            f" {run.config.training.local_batch_size} * {run.degrees.batch}"),
    Refusal("training.batch_size_ramp",
            "sizes must grow from phase to phase, and from the last to training.global_batch_size",
            lambda run: any(a >= b for a, b in pairwise([*_ramp(run), _batch_size(run)]))),
    Refusal("parallelism.data_parallel",
            "debug.determinism elastic needs fsdp2, whose reduction it replaces",
            lambda run: run.config.debug.is_elastic and _is_not_fsdp2(run)),
    Refusal("parallelism.data_parallel_replicate_degree",
            "debug.determinism elastic does not order the sum over copies",
            lambda run: run.config.debug.is_elastic and not _is_ddp(run)
            and run.degrees.dp_replicate > 1),
    Refusal("parallelism.data_parallel_shard_degree",
            "debug.determinism elastic adds pairwise: it needs a power of two",
            lambda run: run.config.debug.is_elastic and not _is_power_of_two(run.degrees.dp_shard)),
    Refusal("training.global_batch_size",
            "debug.determinism elastic adds pairwise: it needs a power of two of microbatches",
            lambda run: run.config.debug.is_elastic and _microbatches(run).is_integer()
            and not _is_power_of_two(_microbatches(run))),
    Refusal("parallelism.fsdp_reduce_gradients",
            "debug.determinism elastic adds pairwise, last_microbatch one after the other",
            lambda run: run.config.debug.is_elastic
            and is_set(run.config.parallelism, "fsdp_reduce_gradients")),
    Refusal("parallelism.context_parallel_degree",
            "debug.determinism elastic is proved for data and tensor parallel only",
            lambda run: run.config.debug.is_elastic and run.degrees.cp > 1),
    Refusal("parallelism.pipeline_parallel_degree",
            "debug.determinism elastic is proved for data and tensor parallel only",
            lambda run: run.config.debug.is_elastic and run.degrees.pp > 1),
    Refusal("parallelism.expert_parallel_degree",
            "debug.determinism elastic is proved for data and tensor parallel only",
            lambda run: run.config.debug.is_elastic and _ep(run) > 1),
    Refusal("parallelism.fsdp_cpu_offload",
            "optimizer.name muon would multiply its matrices on the host",
            lambda run: run.config.optimizer.name == "muon"
            and run.config.parallelism.fsdp_cpu_offload),
    Refusal("activation_checkpoint.mode",
            "memory_budget cannot free the weights that simple_fsdp gathers",
            lambda run: has_budget(run.config) and _is_simple_fsdp(run)),
    Refusal("parallelism.tensor_parallel_degree",
            "with memory_budget PyTorch 2.13 wants to know how large a mesh is, and cannot",
            lambda run: has_budget(run.config) and run.degrees.tp > 1),
    # It saves attention's random state and the mesh for backward, and then takes one for the other.
    Refusal("activation_checkpoint.mode",
            "without a GPU, PyTorch 2.13 cannot compile blocks that are recomputed as a whole with"
            " tensor parallel or simple_fsdp",
            lambda run: _compiles_whole_recomputation(run) and not run.has_gpu),
    Refusal("profiling.enable_memory_snapshot", "needs a CUDA device",
            lambda run: run.config.profiling.enable_memory_snapshot and not run.has_gpu),
    Refusal("float8.recipe",
            "needs a GPU of CUDA capability 8.9 or more; float8.emulate is for tests elsewhere",
            lambda run: is_float8(run.config) and not run.config.float8.emulate
            and not (run.has_gpu and has_float8())),
    Refusal("parallelism.pipeline_parallel_schedule",
            "zero bubble splits backward in two, and float8 would do all of it in both",
            lambda run: is_float8(run.config) and _has_zero_bubble(run)),
    Refusal("training.seq_len",
            "float8 multiplies by 16 tokens: a rank's part of a microbatch must be a multiple",
            lambda run: is_float8(run.config) and _tokens_of_product(run) % 16 != 0),
    Refusal("metrics.straggler_window",
            "simple_fsdp gathers weights inside the blocks: their times say nothing",
            lambda run: _is_simple_fsdp(run) and run.config.metrics.straggler_window > 0),
    Refusal("metrics.straggler_window",
            "compares ranks that do not wait for each other in every layer, as those of tensor and"
            " context parallelism do: it needs more than one",
            lambda run: run.config.metrics.straggler_window > 0
            and run.degrees.pp * run.degrees.batch == 1),
)  # fmt: skip
# What holds for the batch size must hold for each size of the ramp.
REFUSALS += tuple(
    Refusal("training.batch_size_ramp", f"each size: {row.reason}", _in_ramp(row.applies))
    for row in REFUSALS
    if row.key == "training.global_batch_size"
)
