"""Configuration keys that would change what a trace shows to be slow."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from metrics.trace_summary import CollectiveTime, RankSummary, Skew
from runtime.commands import command_text

# Shares of a step from which on a part of it is worth a line.
EXPOSED, DATA_WAIT, HOST, COMPUTE, WAITED, MOSTLY = 0.05, 0.05, 0.15, 0.7, 0.05, 0.7
# By mesh dim, as the description of a process group has it; the first that fits.
MESH_KEYS = {
    "dp_shard": (
        "training.local_batch_size (more compute per all-gather)",
        "parallelism.fsdp_reshard_after_forward",
        "parallelism.fsdp_forward_prefetch",
        'parallelism.fsdp_reduce_gradients = "last_microbatch"',
    ),
    "dp_replicate": ("training.local_batch_size", "training.mixed_precision_reduce"),
    "tp": ("parallelism.tensor_parallel_degree", "parallelism.tensor_parallel_async"),
    "ep": ("parallelism.expert_parallel_degree",),
    "cp": ("parallelism.context_parallel_method", "parallelism.context_parallel_degree"),
    "pp": (
        "parallelism.pipeline_parallel_schedule",
        "parallelism.pipeline_parallel_microbatch_size",
    ),
}
RESHARD, REDUCE = "parallelism.fsdp_reshard_after_forward", "parallelism.fsdp_reduce_gradients"
# Values of these keys that leave nothing to gain.
FASTEST = {
    RESHARD: "never",
    REDUCE: "last_microbatch",
    "training.mixed_precision_reduce": "bfloat16",
    "parallelism.tensor_parallel_async": True,
}
# Keys that other kinds of data parallel reject.
ONLY_FSDP2 = {"parallelism.fsdp_forward_prefetch", REDUCE}
# Async tensor parallel needs NCCL.
GLOO_KEYS = MESH_KEYS | {"tp": ("parallelism.tensor_parallel_degree",)}
# Degrees in the configuration, and the dim that communicates if the degree is above 1.
DEGREES = {
    "tensor_parallel_degree": "tp",
    "context_parallel_degree": "cp",
    "pipeline_parallel_degree": "pp",
    "expert_parallel_degree": "ep",
}


def advice(ranks: Sequence[RankSummary], skew: Skew, config: Mapping[str, Any]) -> list[str]:
    """One line per part of the step that is large: its share, and the keys that change it.

    ``config``: tables of the run's config.toml; {} if unknown.
    """
    return list(_advice(ranks, skew, config))


def _advice(ranks: Sequence[RankSummary], skew: Skew, config: Mapping[str, Any]) -> Iterator[str]:
    time = sum(each.time for each in ranks)
    share = {
        name: sum(getattr(each, name) for each in ranks) / time
        for name in ("compute", "exposed", "data_wait", "host")
    }
    # Stages of a pipeline wait for each other by its schedule, whatever their machines.
    is_pipeline = (_value(config, "parallelism", "pipeline_parallel_degree") or 1) > 1
    if not is_pipeline and (late := late_rank(ranks, skew)) is not None:
        text = f"the others wait {100 * skew.caused[late] / ranks[0].time:.1f} % of a step for it"
        # The detector compares ranks that hold other data or layers.
        degree = _value(config, "parallelism", "tensor_parallel_degree") or 1
        during = "; during the run, metrics.straggler_window" if len(ranks) > degree else ""
        yield (
            f"rank {late} came last in {skew.n_last[late]} of {skew.n_compared} collectives, and"
            f" {text}: compare its machine with {command_text('preflight', 'CONFIG')}{during}"
        )
    if share["data_wait"] > DATA_WAIT:
        yield (
            f"waiting for data, {_percent(share['data_wait'])}: data.prefetch for bursts; else"
            f' tokenize once with {command_text("prepare")} and read data.source = "tokens"'
        )
    if share["exposed"] > EXPOSED:
        slowest = max(ranks, key=lambda each: each.exposed)
        useless = _useless_keys(config, ranks[0].world_size)
        found = (_keys_of(each, config, useless) for each in _large(slowest))
        for keys in filter(None, dict.fromkeys(found)):
            yield f"exposed communication, {_percent(share['exposed'])}: {keys}"
    is_compiled = _value(config, "compile", "enable") is True
    if share["host"] > HOST:
        what = "the GPU has nothing to do" if ranks[0].is_gpu else "Python between operators"
        compiled = "" if is_compiled else "compile.enable, "
        yield f"host, {_percent(share['host'])} ({what}): {compiled}training.local_batch_size"
    if share["compute"] > COMPUTE:
        compute_keys = [
            *([] if is_compiled else ["compile.enable"]),
            *(["activation_checkpoint.mode"] if _recomputes(config) else []),
            *(["float8.recipe"] if ranks[0].is_gpu and not _has_float8(config) else []),
        ]
        if compute_keys:
            yield f"compute, {_percent(share['compute'])}: {', '.join(compute_keys)}"


def late_rank(ranks: Sequence[RankSummary], skew: Skew) -> int | None:
    """The rank that the others wait for; None if they wait little, or for each other in turn."""
    if skew.n_compared == 0:
        return None
    rank = max(skew.caused, key=skew.caused.__getitem__)
    all_caused = sum(skew.caused.values())
    is_long = skew.caused[rank] > WAITED * ranks[0].time
    return rank if is_long and skew.caused[rank] > MOSTLY * all_caused else None


def _large(rank: RankSummary) -> list[CollectiveTime]:
    """Collectives with a good part of the rank's exposed time; the most exposed if none has."""
    large = [each for each in rank.by_collective if each.exposed > 0.2 * rank.exposed]
    return large or list(rank.by_collective[:1])


def _keys_of(collective: CollectiveTime, config: Mapping[str, Any], useless: set[str]) -> str:
    for dim, keys in MESH_KEYS.items():
        if dim in collective.description:
            return _without(keys, useless)
    # gloo does not name the mesh dim, but the configuration may leave only one.
    degrees = {name: _value(config, "parallelism", name) for name in DEGREES}
    dims = [DEGREES[name] for name, degree in degrees.items() if degree not in (None, 1)]
    if config and not dims:
        is_ddp = _value(config, "parallelism", "data_parallel") == "ddp"
        return _without(GLOO_KEYS["dp_replicate" if is_ddp else "dp_shard"], useless)
    return "; ".join(_without(GLOO_KEYS[dim], useless) for dim in dims or ["dp_shard"])


def _without(keys: Sequence[str], useless: set[str]) -> str:
    return ", ".join(text for text in keys if text.partition(" ")[0] not in useless)


def _useless_keys(config: Mapping[str, Any], world_size: int) -> set[str]:
    """Keys that cannot make this run faster, or whose change it would reject."""
    useless = {key for key, value in FASTEST.items() if _value(config, *key.split(".")) == value}
    kind = _value(config, "parallelism", "data_parallel")
    has_pipeline = (_value(config, "parallelism", "pipeline_parallel_degree") or 1) > 1
    if kind not in (None, "fsdp2"):
        useless |= ONLY_FSDP2
    recomputes = _value(config, "activation_checkpoint", "mode") not in (None, "none")
    if kind == "ddp" or (kind == "simple_fsdp" and recomputes):
        useless.add(RESHARD)
    if has_pipeline and kind in (None, "fsdp2"):
        # Its default keeps the weights, and reduces once.
        useless |= {RESHARD, REDUCE}
    is_elastic = _value(config, "debug", "deterministic") == "elastic"
    if is_elastic or _microbatches(config, world_size) == 1:
        useless.add(REDUCE)
    if config and _value(config, "compile", "enable") is not True:
        useless.add("parallelism.tensor_parallel_async")
    return useless


def _microbatches(config: Mapping[str, Any], world_size: int) -> float | None:
    """Microbatches of a data-parallel rank in a step; None if they are not known."""
    rows, in_one = (
        _value(config, "training", f"{name}_batch_size") for name in ("global", "local")
    )
    degrees = [_value(config, "parallelism", name) for name, dim in DEGREES.items() if dim != "ep"]
    if not all(type(each) is int and each > 0 for each in (rows, in_one, *degrees)):
        return None
    return rows * math.prod(degrees) / (in_one * world_size)


def _recomputes(config: Mapping[str, Any]) -> bool:
    return _value(config, "activation_checkpoint", "mode") != "none"


def _has_float8(config: Mapping[str, Any]) -> bool:
    return _value(config, "float8", "recipe") not in (None, "none")


def _value(config: Mapping[str, Any], table: str, key: str) -> Any:
    section = config.get(table)
    return section.get(key) if isinstance(section, dict) else None


def _percent(share: float) -> str:
    return f"{100 * share:.1f} % of a step"
