"""Constraints on settings that depend on the model, the ranks or the hardware.

They are checked before any process group or device is touched. This table and that of
``config/constraints.py`` are written to ``docs/reference/constraints.md``.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import torch

from config import ConfigError
from config.auto import auto_keys
from config.constraints import CONFIG_CONSTRAINTS, Constraint, has_budget, is_float8, is_set
from config.job_config import JobConfig
from parallelisms.parallel_dims import Degrees, resolve_degrees, sequence_multiple
from parallelisms.pipeline_parallel import stages_per_rank


class ModelShape(Protocol):
    """Sizes of a model that parallelism degrees must divide."""

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
class RunContext:
    """Facts that constraints on a run may depend on."""

    config: JobConfig
    shape: ModelShape
    degrees: Degrees
    has_gpu: bool
    lacks_float8: bool
    """The GPU has no float8 matmuls."""


def check_constraints(
    config: JobConfig,
    shape: ModelShape,
    world_size: int,
    *,
    has_gpu: bool,
    lacks_float8: bool = False,
    n_nodes: int = 1,
) -> Degrees:
    """Return the degrees of this run. Raises ``ConfigError`` with all violated constraints.

    ``has_gpu``, and one that ``lacks_float8``: the machine that will train. ``n_nodes`` only
    matters for the advice about degrees that do not fit ``world_size``.
    """
    try:
        degrees = resolve_degrees(config.parallelism, world_size, n_nodes=n_nodes)
    except ValueError as error:
        raise ConfigError([str(error)]) from None
    run = RunContext(config, shape, degrees, has_gpu, lacks_float8)
    found = [row.message(config) for row in CONFIG_CONSTRAINTS if row.violated(config)]
    if undecided := auto_keys(config):
        text = '"auto" is decided by ./shardloom train, and by ./shardloom plan with --device'
        raise ConfigError([*found, *(f"{key}: {text}" for key in undecided)])
    found += [row.message(run) for row in RUN_CONSTRAINTS if row.violated(run)]
    if found:
        raise ConfigError(found)
    return degrees


def cuda_graph_obstacle(
    config: JobConfig, degrees: Degrees, *, has_gpu: bool, has_experts: bool
) -> str:
    """Return what CUDA graphs do not support in this run; "" if they support all of it."""
    recomputation, mode = config.activation_checkpoint, config.parallelism.data_parallel
    recomputes_attention = {
        "none": False,
        "selective": recomputation.selective != "op",
        # With half of the memory or more, the compiler kept it.
        "memory_budget": recomputation.memory_budget < 0.5,
        "full": True,
    }[recomputation.mode]
    recomputes = mode == "simple_fsdp" or recomputation.mode != "none"
    reshard = config.parallelism.fsdp_reshard_after_forward
    reasons = {
        "no GPU": not has_gpu,
        "pipeline parallel": degrees.pp > 1,
        "experts": has_experts,
        "ddp": mode == "ddp" and degrees.batch * degrees.cp * degrees.tp > 1,
        "parallelism.fsdp_cpu_offload": config.parallelism.fsdp_cpu_offload,
        # FSDP2 waits in a later step for what the resharding of one recorded.
        "parallelism.fsdp_reshard_after_forward = N": type(reshard) is int,
        "debug.deterministic": config.debug.is_elastic,
        "metrics.straggler_window": config.metrics.straggler_window > 0,
        # It captures graphs of its own, which a capture does not allow.
        'compile.backend = "cudagraphs"': config.compile.enable
        and config.compile.backend == "cudagraphs",
        # The compiler then keeps states of a random generator that a capture does not know.
        "compiled recomputation of attention": config.compile.enable and recomputes_attention,
        # Each recomputation takes states of the generator, which a capture does not allow.
        "recomputation in a model of your own": config.model.is_outside and recomputes,
    }
    return next((reason for reason, is_true in reasons.items() if is_true), "")


def _obstacle_to_always(run: RunContext) -> str:
    """``cuda_graph_obstacle`` of a run whose ``compile.cuda_graphs`` is "always"; else ""."""
    if run.config.compile.cuda_graphs != "always":
        return ""
    # Experts of the user's own model are known once it is built.
    has_experts = _has_experts(run) and not run.config.model.is_outside
    return cuda_graph_obstacle(
        run.config, run.degrees, has_gpu=run.has_gpu, has_experts=has_experts
    )


def _tp_must_divide(name: str, size: Callable[[RunContext], int]) -> Constraint[RunContext]:
    return Constraint(
        "parallelism.tensor_parallel_degree",
        f"must divide {name}",
        lambda run: size(run) % run.degrees.tp != 0,
        lambda run: f"{run.degrees.tp} does not divide {size(run)}",
    )


def _key_heads(run: RunContext) -> int:
    """Key heads of the model's Gated DeltaNet layers; 0 if it has none."""
    return getattr(run.shape, "n_key_heads", 0)


def _can_shard_delta_net_heads(run: RunContext) -> bool:
    cp, tp = run.degrees.cp, run.degrees.tp
    heads, values = _key_heads(run) // tp or 1, getattr(run.shape, "n_value_heads", 0) // tp
    return heads % cp == 0 or (cp % heads == 0 and values % cp == 0)


def _ep(run: RunContext) -> int:
    return run.config.parallelism.expert_parallel_degree


def _n_experts(run: RunContext) -> int:
    return getattr(run.shape, "n_experts", 0)


def _has_experts(run: RunContext) -> bool:
    return _n_experts(run) > 0


def _expert_ranks(run: RunContext) -> int:
    return run.degrees.dp_shard * run.degrees.cp * run.degrees.tp


def _divisors(number: int) -> str:
    """The divisors of ``number``, as in ``1, 2 or 4``."""
    *smaller, last = [str(n) for n in range(1, number + 1) if number % n == 0]
    return f"{', '.join(smaller)} or {last}" if smaller else last


def _has_expert_mesh(run: RunContext) -> bool:
    return _has_experts(run) and _ep(run) * run.degrees.tp > 1


def _has_zero_bubble(run: RunContext) -> bool:
    schedule = run.config.parallelism.pipeline_parallel_schedule
    return run.degrees.pp > 1 and schedule == "InterleavedZeroBubble"


def _stages(run: RunContext) -> int:
    return run.degrees.pp * stages_per_rank(run.config.parallelism)


def _pipeline_microbatches(run: RunContext) -> float:
    rows = _microbatches(run) * run.config.training.decided_local_batch_size
    return rows / run.config.parallelism.pipeline_parallel_microbatch_size


def _batch_size(run: RunContext) -> int:
    training = run.config.training
    return training.global_batch_size or training.decided_local_batch_size * run.degrees.batch


def _microbatches(run: RunContext) -> float:
    return _batch_size(run) / (run.config.training.decided_local_batch_size * run.degrees.batch)


def _ramp(run: RunContext) -> list[int]:
    return [phase.global_batch_size for phase in run.config.training.batch_size_ramp]


def _phases(run: RunContext) -> list[RunContext]:
    """Return the run with each batch size of the ramp."""
    training = run.config.training
    sizes = [training.model_copy(update={"global_batch_size": n}) for n in _ramp(run)]
    configs = [run.config.model_copy(update={"training": section}) for section in sizes]
    return [replace(run, config=config) for config in configs]


def _in_ramp(row: Constraint[RunContext]) -> Constraint[RunContext]:
    """Return the constraint that each batch size of the ramp satisfies ``row``."""

    def first_detail(run: RunContext) -> str:
        assert row.detail is not None
        return next(row.detail(phase) for phase in _phases(run) if row.violated(phase))

    return Constraint(
        "training.batch_size_ramp",
        f"each size: {row.reason}",
        lambda run: any(map(row.violated, _phases(run))),
        first_detail if row.detail is not None else None,
    )


def _is_ddp(run: RunContext) -> bool:
    return run.config.parallelism.data_parallel == "ddp"


def _is_simple_fsdp(run: RunContext) -> bool:
    return run.config.parallelism.data_parallel == "simple_fsdp"


def _is_not_fsdp2(run: RunContext) -> bool:
    return run.config.parallelism.data_parallel != "fsdp2"


def _sequences_per_microbatch(run: RunContext) -> int:
    if run.degrees.pp > 1:
        return run.config.parallelism.pipeline_parallel_microbatch_size
    return run.config.training.decided_local_batch_size


def _tokens_per_matmul(run: RunContext) -> int:
    return _sequences_per_microbatch(run) * run.config.training.seq_len // run.degrees.cp


def _is_power_of_two(count: float) -> bool:
    return math.log2(count).is_integer()


def _is_reshard_group_invalid(run: RunContext) -> bool:
    group = run.config.parallelism.fsdp_reshard_after_forward
    shards = run.degrees.dp_shard * run.degrees.cp
    if not isinstance(group, int) or _is_ddp(run):
        return False
    return group in (1, shards) or shards % group != 0


def _compiles_whole_recomputation(run: RunContext) -> bool:
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
RUN_CONSTRAINTS: tuple[Constraint[RunContext], ...] = (
    Constraint("parallelism.data_parallel_shard_degree",
            'must be 1 or -1 with data_parallel = "ddp", which does not shard',
            lambda run: _is_ddp(run)
            and run.config.parallelism.data_parallel_shard_degree not in (-1, 1)),
    Constraint("parallelism.data_parallel_replicate_degree",
            'must be 1 or the number of data-parallel ranks with data_parallel = "ddp"',
            lambda run: _is_ddp(run) and run.config.parallelism.data_parallel_replicate_degree
            not in (1, run.degrees.dp_replicate)),
    Constraint("parallelism.fsdp_reshard_after_forward",
            'has no effect with data_parallel = "ddp"',
            lambda run: _is_ddp(run)
            and is_set(run.config.parallelism, "fsdp_reshard_after_forward")),
    Constraint("parallelism.fsdp_reshard_after_forward",
            'must be "default" or "never" with data_parallel = "simple_fsdp"',
            lambda run: _is_simple_fsdp(run)
            and run.config.parallelism.fsdp_reshard_after_forward not in ("default", "never")),
    Constraint("parallelism.fsdp_reshard_after_forward",
            '"never" with simple_fsdp requires activation_checkpoint.mode = "none", because a'
            " block that recomputes gathers its weights again",
            lambda run: _is_simple_fsdp(run)
            and run.config.parallelism.fsdp_reshard_after_forward == "never"
            and run.config.activation_checkpoint.mode != "none"),
    Constraint("parallelism.fsdp_reshard_after_forward",
            "an integer must divide data_parallel_shard_degree * context_parallel_degree, and be"
            " neither 1 nor equal to it",
            _is_reshard_group_invalid,
            lambda run: f"{run.config.parallelism.fsdp_reshard_after_forward}; the product is"
            f" {run.degrees.dp_shard * run.degrees.cp}"),
    # Only some ranks would create its process groups, and would wait for the others.
    Constraint("parallelism.fsdp_reshard_after_forward",
            "an integer is not supported with tensor or pipeline parallelism",
            lambda run: isinstance(run.config.parallelism.fsdp_reshard_after_forward, int)
            and run.degrees.tp * run.degrees.pp > 1),
    Constraint("parallelism.fsdp_reduce_gradients",
            'supported only with data_parallel = "fsdp2": ddp reduces after the last microbatch,'
            " simple_fsdp after each",
            lambda run: _is_not_fsdp2(run)
            and is_set(run.config.parallelism, "fsdp_reduce_gradients")),
    Constraint("parallelism.fsdp_forward_prefetch",
            'supported only with data_parallel = "fsdp2"',
            lambda run: _is_not_fsdp2(run)
            and is_set(run.config.parallelism, "fsdp_forward_prefetch")),
    Constraint("parallelism.fsdp_backward_prefetch",
            'supported only with data_parallel = "fsdp2"',
            lambda run: _is_not_fsdp2(run)
            and is_set(run.config.parallelism, "fsdp_backward_prefetch")),
    Constraint("parallelism.fsdp_backward_prefetch",
            'has no effect with fsdp_reshard_after_forward = "never", nor with "default" in a'
            " pipeline",
            lambda run: run.config.parallelism.fsdp_backward_prefetch > 0
            and run.config.parallelism.fsdp_reshard_after_forward
            in (("never",) if run.degrees.pp == 1 else ("never", "default"))),
    Constraint("parallelism.fsdp_reduce_gradients", "has no effect with one microbatch per step",
            lambda run: _microbatches(run) == 1 and run.degrees.pp == 1
            and is_set(run.config.parallelism, "fsdp_reduce_gradients")),
    Constraint("parallelism.fsdp_cpu_offload",
            'supported only with data_parallel = "fsdp2"',
            lambda run: _is_not_fsdp2(run) and run.config.parallelism.fsdp_cpu_offload),
    Constraint("parallelism.fsdp_cpu_offload", "requires a GPU to offload from",
            lambda run: run.config.parallelism.fsdp_cpu_offload and not run.has_gpu),
    # 0 turns it off, so that one file may serve both kinds of models.
    Constraint("experts.balance_loss", "has no effect: the model has no MoE layers",
            lambda run: not _has_experts(run) and run.config.experts.balance_loss != 0.0
            and is_set(run.config.experts, "balance_loss")),
    Constraint("experts.balance_bias_rate", "has no effect: the model has no MoE layers",
            lambda run: not _has_experts(run) and is_set(run.config.experts, "balance_bias_rate")),
    Constraint("debug.deterministic", '"elastic" is supported for dense models only',
            lambda run: _has_experts(run) and run.config.debug.is_elastic),
    Constraint("parallelism.expert_parallel_degree", "must be 1: the model has no MoE layers",
            lambda run: _ep(run) > 1 and not _has_experts(run)),
    Constraint("parallelism.expert_parallel_degree", "must divide the model's n_experts",
            lambda run: _n_experts(run) % _ep(run) != 0,
            lambda run: f"{_ep(run)} does not divide {_n_experts(run)}"),
    Constraint("parallelism.expert_parallel_degree",
            "must divide data_parallel_shard_degree * context_parallel_degree *"
            " tensor_parallel_degree",
            lambda run: _has_experts(run) and _expert_ranks(run) % _ep(run) != 0,
            lambda run: f"{_ep(run)} does not divide {_expert_ranks(run)};"
            f" {_divisors(math.gcd(_expert_ranks(run), _n_experts(run)))} would"),
    Constraint("parallelism.data_parallel",
            'must be "fsdp2" for MoE models with expert or tensor parallel, whose experts have a'
            " mesh of their own",
            lambda run: _has_expert_mesh(run) and _is_not_fsdp2(run)),
    Constraint("parallelism.fsdp_reshard_after_forward",
            "an integer is not supported with expert parallel",
            lambda run: _has_expert_mesh(run)
            and isinstance(run.config.parallelism.fsdp_reshard_after_forward, int)),
    Constraint("metrics.straggler_window",
            "not supported with expert parallel, or tensor parallel of MoE models: ranks wait for"
            " each other's tokens or experts in every MoE layer",
            lambda run: _has_expert_mesh(run) and run.config.metrics.straggler_window > 0),
    _tp_must_divide("the model's n_heads", lambda run: run.shape.n_heads),
    # Ranks may outnumber the KV heads, because they gather the heads that they need.
    _tp_must_divide("the model's n_kv_heads * head_dim",
                    lambda run: run.shape.n_kv_heads * run.shape.head_dim),
    # Tensor parallel does not shard experts.
    _tp_must_divide("the model's hidden_dim",
                    lambda run: 0 if _has_experts(run) else run.shape.hidden_dim),
    # By default the vocabulary is padded to a multiple of 64.
    _tp_must_divide("model.vocab_size", lambda run: run.config.model.vocab_size or 64),
    Constraint("training.seq_len",
            "must be a multiple of tensor_parallel_degree * context_parallel_degree, or of twice"
            ' that with context_parallel_method = "allgather"',
            lambda run: run.config.training.seq_len
            % sequence_multiple(run.degrees, run.config.parallelism.context_parallel_method) != 0),
    Constraint("parallelism.tensor_parallel_async", "has no effect: tensor_parallel_degree is 1",
            lambda run: run.config.parallelism.tensor_parallel_async and run.degrees.tp == 1),
    Constraint("parallelism.tensor_parallel_async", "requires GPUs",
            lambda run: run.config.parallelism.tensor_parallel_async and not run.has_gpu),
    Constraint("parallelism.tensor_parallel_async",
            'requires compile.enable and compile.backend = "inductor"',
            lambda run: run.config.parallelism.tensor_parallel_async
            and not (run.config.compile.enable and run.config.compile.backend == "inductor")),
    # PyTorch 2.13's pass does not match the all-gather of a single sequence (read and measured).
    Constraint("parallelism.tensor_parallel_async",
            "overlaps all-gathers only in microbatches of several sequences: raise"
            " training.local_batch_size or, in a pipeline, pipeline_parallel_microbatch_size",
            lambda run: run.config.parallelism.tensor_parallel_async
            and _sequences_per_microbatch(run) == 1),
    Constraint("parallelism.context_parallel_method", "has no effect: context_parallel_degree is 1",
            lambda run: run.degrees.cp == 1
            and is_set(run.config.parallelism, "context_parallel_method")),
    Constraint("parallelism.context_parallel_method",
            'with "ulysses", context_parallel_degree * tensor_parallel_degree must divide'
            ' n_heads; "allgather" has no such limit',
            lambda run: run.config.parallelism.context_parallel_method == "ulysses"
            and run.shape.n_heads % (run.degrees.cp * run.degrees.tp) != 0
            and run.degrees.cp > 1),
    _tp_must_divide("the model's n_key_heads", _key_heads),
    Constraint("parallelism.context_parallel_degree",
            "must divide the n_key_heads per tensor-parallel rank, or be a multiple of them that"
            " divides its n_value_heads: Gated DeltaNet layers are sharded by heads",
            lambda run: _key_heads(run) > 0 and not _can_shard_delta_net_heads(run)),
    Constraint("parallelism.pipeline_parallel_degree",
            "must not give more stages than the model has layers",
            lambda run: run.degrees.pp > 1 and _stages(run) > run.shape.n_layers),
    Constraint("parallelism.pipeline_parallel_schedule",
            "has no effect, like the other pipeline_parallel keys: pipeline_parallel_degree is 1",
            lambda run: run.degrees.pp == 1 and is_set(run.config.parallelism, *PIPELINE_KEYS)),
    Constraint("parallelism.pipeline_parallel_stages_per_rank",
            "supported only with an interleaved pipeline_parallel_schedule",
            lambda run: run.degrees.pp > 1 and stages_per_rank(run.config.parallelism) == 1
            and is_set(run.config.parallelism, "pipeline_parallel_stages_per_rank")),
    Constraint("parallelism.pipeline_parallel_microbatch_size",
            "must divide training.local_batch_size",
            lambda run: run.degrees.pp > 1 and run.config.training.decided_local_batch_size
            % run.config.parallelism.pipeline_parallel_microbatch_size != 0),
    Constraint("training.global_batch_size",
            'must give each rank at least as many microbatches as the pipeline has stages, with'
            ' pipeline_parallel_schedule = "1F1B"',
            lambda run: run.degrees.pp > 1 and _pipeline_microbatches(run) < _stages(run)
            and run.config.parallelism.pipeline_parallel_schedule == "1F1B"),
    Constraint("training.global_batch_size",
            "must give each rank a multiple of pipeline_parallel_degree microbatches, with an"
            " interleaved pipeline_parallel_schedule",
            lambda run: run.degrees.pp > 1 and stages_per_rank(run.config.parallelism) > 1
            and _pipeline_microbatches(run) % run.degrees.pp != 0),
    Constraint("parallelism.fsdp_reshard_after_forward",
            '"never" is not supported with simple_fsdp in a pipeline: each microbatch would keep'
            " a copy of the weights",
            lambda run: run.degrees.pp > 1 and _is_simple_fsdp(run)
            and run.config.parallelism.fsdp_reshard_after_forward == "never"),
    Constraint("parallelism.fsdp_forward_prefetch",
            "not supported with an interleaved pipeline, which gathers whole stages",
            lambda run: run.degrees.pp > 1 and stages_per_rank(run.config.parallelism) > 1
            and run.config.parallelism.fsdp_forward_prefetch > 0),
    # Backward's second half does not find resharded weights, and loses their gradients.
    Constraint("parallelism.pipeline_parallel_schedule",
            'InterleavedZeroBubble requires fsdp_reshard_after_forward = "default" or "never": it'
            " loses the gradients of weights that are freed after forward",
            lambda run: _has_zero_bubble(run) and run.config.parallelism.fsdp_reshard_after_forward
            not in ("default", "never")),
    Constraint("parallelism.pipeline_parallel_schedule",
            "InterleavedZeroBubble is not supported with compile.enable: it splits backward in"
            " two, but compiled blocks run it whole",
            lambda run: _has_zero_bubble(run) and run.config.compile.enable),
    Constraint("parallelism.pipeline_parallel_schedule",
            "InterleavedZeroBubble supports neither activation checkpointing nor simple_fsdp:"
            " blocks would recompute twice",
            lambda run: _has_zero_bubble(run)
            and (run.config.activation_checkpoint.mode != "none" or _is_simple_fsdp(run))),
    Constraint("training.global_batch_size",
            "must be a multiple of training.local_batch_size times the data-parallel ranks",
            lambda run: not _microbatches(run).is_integer(),
            lambda run: f"{_batch_size(run)} is not a multiple of"
            f" {run.config.training.decided_local_batch_size} * {run.degrees.batch}"),
    Constraint("training.batch_size_ramp",
            "sizes must grow from phase to phase, and from the last to training.global_batch_size",
            lambda run: any(a >= b for a, b in pairwise([*_ramp(run), _batch_size(run)]))),
    Constraint("parallelism.data_parallel",
            'must be "fsdp2" with debug.deterministic = "elastic", to replace its reduce-scatter',
            lambda run: run.config.debug.is_elastic and _is_not_fsdp2(run)),
    Constraint("parallelism.data_parallel_replicate_degree",
            'must be 1 with debug.deterministic = "elastic", which does not order the sum over'
            " replicas",
            lambda run: run.config.debug.is_elastic and not _is_ddp(run)
            and run.degrees.dp_replicate > 1),
    Constraint("parallelism.data_parallel_shard_degree",
            'must be a power of two with debug.deterministic = "elastic", which adds pairwise',
            lambda run: run.config.debug.is_elastic and not _is_power_of_two(run.degrees.dp_shard)),
    Constraint("training.global_batch_size",
            'must give each rank 2^n microbatches with debug.deterministic = "elastic",'
            " which adds pairwise",
            lambda run: run.config.debug.is_elastic and _microbatches(run).is_integer()
            and not _is_power_of_two(_microbatches(run))),
    Constraint("parallelism.fsdp_reduce_gradients",
            '"last_microbatch" is not supported with debug.deterministic = "elastic", which adds'
            " microbatches pairwise",
            lambda run: run.config.debug.is_elastic
            and is_set(run.config.parallelism, "fsdp_reduce_gradients")),
    Constraint("parallelism.context_parallel_degree",
            'must be 1 with debug.deterministic = "elastic", which supports only data and tensor'
            " parallel",
            lambda run: run.config.debug.is_elastic and run.degrees.cp > 1),
    Constraint("parallelism.pipeline_parallel_degree",
            'must be 1 with debug.deterministic = "elastic", which supports only data and tensor'
            " parallel",
            lambda run: run.config.debug.is_elastic and run.degrees.pp > 1),
    Constraint("parallelism.expert_parallel_degree",
            'must be 1 with debug.deterministic = "elastic", which supports only data and tensor'
            " parallel",
            lambda run: run.config.debug.is_elastic and _ep(run) > 1),
    Constraint("parallelism.fsdp_cpu_offload",
            'not supported with optimizer.name = "muon", whose matmuls would run on the host',
            lambda run: run.config.optimizer.name == "muon"
            and run.config.parallelism.fsdp_cpu_offload),
    Constraint("activation_checkpoint.mode",
            '"memory_budget" is not supported with simple_fsdp: it cannot free the gathered'
            " weights",
            lambda run: has_budget(run.config) and _is_simple_fsdp(run)),
    Constraint("parallelism.tensor_parallel_degree",
            'must be 1 with activation_checkpoint.mode = "memory_budget": PyTorch 2.13 cannot'
            " estimate the size of a DeviceMesh",
            lambda run: has_budget(run.config) and run.degrees.tp > 1),
    Constraint("parallelism.context_parallel_method",
            'must be "ulysses" with activation_checkpoint.mode = "memory_budget": PyTorch 2.13'
            " cannot estimate the size of a DeviceMesh",
            lambda run: has_budget(run.config) and run.degrees.cp > 1
            and run.config.parallelism.context_parallel_method == "allgather"),
    # PyTorch saves attention's RNG state and the mesh for backward, and confuses the two.
    Constraint("activation_checkpoint.mode",
            "without a GPU, PyTorch 2.13 cannot compile blocks that recompute as a whole with"
            " tensor parallel or simple_fsdp",
            lambda run: _compiles_whole_recomputation(run) and not run.has_gpu),
    Constraint("profiling.enable_memory_snapshot", "requires a CUDA device",
            lambda run: run.config.profiling.enable_memory_snapshot and not run.has_gpu),
    Constraint("compile.backend",
            "is none that PyTorch has: see torch.compiler.list_backends(exclude_tags=())",
            lambda run: run.config.compile.enable and run.config.compile.backend != "inductor"
            and run.config.compile.backend not in torch.compiler.list_backends(exclude_tags=()),
            lambda run: run.config.compile.backend),
    Constraint("compile.cuda_graphs",
            '"always" is not possible: CUDA graphs do not support all of this run',
            lambda run: _obstacle_to_always(run) != "", _obstacle_to_always),
    Constraint("float8.recipe",
            "requires an NVIDIA GPU of CUDA capability 8.9 or higher; tests elsewhere can use"
            " float8.emulate",
            lambda run: is_float8(run.config) and not run.config.float8.emulate
            and (not run.has_gpu or run.lacks_float8)),
    Constraint("parallelism.pipeline_parallel_schedule",
            "InterleavedZeroBubble is not supported with float8: it splits backward in two, and"
            " float8 would compute all of it in both",
            lambda run: is_float8(run.config) and _has_zero_bubble(run)),
    Constraint("training.seq_len",
            "must give each rank a multiple of 16 tokens per microbatch with float8",
            lambda run: is_float8(run.config) and _tokens_per_matmul(run) % 16 != 0),
    Constraint("metrics.straggler_window",
            "not supported with simple_fsdp, which gathers weights inside the timed blocks",
            lambda run: _is_simple_fsdp(run) and run.config.metrics.straggler_window > 0),
    Constraint("metrics.straggler_window",
            "requires more than one pipeline or data-parallel rank: tensor and context-parallel"
            " ranks wait for each other in every layer",
            lambda run: run.config.metrics.straggler_window > 0
            and run.degrees.pp * run.degrees.batch == 1),
)  # fmt: skip
# Each size of the ramp must satisfy the constraints on the batch size.
RUN_CONSTRAINTS += tuple(
    _in_ramp(row) for row in RUN_CONSTRAINTS if row.key == "training.global_batch_size"
)
