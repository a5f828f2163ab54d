"""Configuration keys that would change what a trace shows to be slow."""

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
# Values of these keys that leave nothing to gain.
FASTEST = {
    "fsdp_reshard_after_forward": "never",
    "fsdp_reduce_gradients": "last_microbatch",
    "mixed_precision_reduce": "bfloat16",
    "tensor_parallel_async": True,
}
# Keys that other kinds of data parallel reject.
ONLY_FSDP2 = ("fsdp_forward_prefetch", "fsdp_reduce_gradients")
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
        for keys in dict.fromkeys(_keys_of(each, config) for each in _large(slowest)):
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


def _keys_of(collective: CollectiveTime, config: Mapping[str, Any]) -> str:
    for dim, keys in MESH_KEYS.items():
        if dim in collective.description:
            return _left(keys, config)
    # gloo does not name the mesh dim, but the configuration may leave only one.
    degrees = {name: _value(config, "parallelism", name) for name in DEGREES}
    dims = [DEGREES[name] for name, degree in degrees.items() if degree not in (None, 1)]
    if config and not dims:
        is_ddp = _value(config, "parallelism", "data_parallel") == "ddp"
        return _left(GLOO_KEYS["dp_replicate" if is_ddp else "dp_shard"], config)
    return "; ".join(_left(GLOO_KEYS[dim], config) for dim in dims or ["dp_shard"])


def _left(keys: Sequence[str], config: Mapping[str, Any]) -> str:
    """Join those of ``keys`` that ``config`` can still change for the better."""
    kind = _value(config, "parallelism", "data_parallel")
    found = []
    for text in keys:
        table, name = text.partition(" ")[0].split(".")
        is_fastest = name in FASTEST and _value(config, table, name) == FASTEST[name]
        is_rejected = name in ONLY_FSDP2 and kind not in (None, "fsdp2")
        if not is_fastest and not is_rejected:
            found.append(text)
    return ", ".join(found)


def _recomputes(config: Mapping[str, Any]) -> bool:
    return _value(config, "activation_checkpoint", "mode") != "none"


def _has_float8(config: Mapping[str, Any]) -> bool:
    return _value(config, "float8", "recipe") not in (None, "none")


def _value(config: Mapping[str, Any], table: str, key: str) -> Any:
    section = config.get(table)
    return section.get(key) if isinstance(section, dict) else None


def _percent(share: float) -> str:
    return f"{100 * share:.1f} % of a step"
