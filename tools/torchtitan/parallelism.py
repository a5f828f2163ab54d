"""Translate torchtitan's parallelism: degrees, DDP, and the stages of a pipeline."""

from models import find_model
from tools.torchtitan.given import Given, Translation, list_of

SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved1f1b": "Interleaved1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "interleavedzerobubble": "InterleavedZeroBubble",
}
SPLITS = ("parallelism.pipeline_parallel_split_points", "parallelism.module_fqns_per_model_part")
# Until then DDP computed in float32 whatever mixed_precision_param was.
FLOAT32_DDP = "2025-05"


def translate_ranks(given: Given, result: Translation) -> None:
    replicas = given["parallelism.data_parallel_replicate_degree"]
    shards = given["parallelism.data_parallel_shard_degree"]
    is_ddp = replicas > 1 and shards == 1
    if given["training.data_parallel_type"] == "ddp":
        is_ddp, replicas, shards = True, max(1, shards), 1
    if is_ddp:
        result.keys["parallelism.data_parallel"] = "ddp"
        if given.month <= FLOAT32_DDP and given["training.dtype"] == "float32":
            result.keys["training.mixed_precision_param"] = "float32"
        if replicas > 1:
            result.keys["parallelism.data_parallel_replicate_degree"] = replicas
    else:
        result.keys["parallelism.data_parallel_replicate_degree"] = replicas
        result.keys["parallelism.data_parallel_shard_degree"] = shards
    if given["parallelism.context_parallel_degree"] > 1:
        result.keys["parallelism.context_parallel_method"] = "allgather"
    experts = given["parallelism.expert_parallel_degree"]
    if result.keys.get("model.name") == "qwen3_moe":
        result.keys["parallelism.expert_parallel_degree"] = experts
    elif experts > 1:
        result.drop("parallelism.expert_parallel_degree", "the model has no experts")
    if given["parallelism.enable_async_tensor_parallel"]:
        has_effect = (
            given["parallelism.tensor_parallel_degree"] > 1
            and given["compile.enable"]
            and _sequences_per_microbatch(given) > 1
        )
        if has_effect:
            result.keys["parallelism.tensor_parallel_async"] = True
        else:
            result.drop(
                given.written["parallelism.enable_async_tensor_parallel"],
                "without effect here but with tensor parallel, compile.enable and microbatches of"
                " several sequences",
            )


def _microbatch_size(given: Given) -> int:
    """Sequences of a pipeline's microbatch."""
    count = given["parallelism.pipeline_parallel_microbatches"]
    if count is not None and count > 0:
        return max(1, given["training.local_batch_size"] // count)
    return int(given["parallelism.pipeline_parallel_microbatch_size"])


def _sequences_per_microbatch(given: Given) -> int:
    is_pipeline = given["parallelism.pipeline_parallel_degree"] > 1
    return _microbatch_size(given) if is_pipeline else int(given["training.local_batch_size"])


def translate_pipeline(given: Given, result: Translation) -> None:
    ranks = given["parallelism.pipeline_parallel_degree"]
    if ranks <= 1:
        return
    asked = given["parallelism.pipeline_parallel_schedule"]
    schedule = SCHEDULES.get(asked.lower())
    if schedule is None:
        known = ", ".join(dict.fromkeys(SCHEDULES.values()))
        result.problems.append(
            f"parallelism.pipeline_parallel_schedule = {asked!r}: choose one of {known}; all of"
            " them train the same"
        )
        return
    keys = {"schedule": schedule, "microbatch_size": _microbatch_size(given)}
    for name in ("first_stage_less_layers", "last_stage_less_layers"):
        keys[name] = given[f"parallelism.pipeline_parallel_{name}"]
    stages = _stages(given, result)
    if stages is not None and stages % ranks != 0:
        result.problems.append(
            f"parallelism.pipeline_parallel_degree = {ranks}: {stages} stages are no multiple of it"
        )
    elif schedule.startswith("Interleaved"):
        keys["stages_per_rank"] = 2 if stages is None else stages // ranks
    for name in SPLITS:
        if name in given:
            result.drop(given.written[name], "layers are assigned to stages by weight")
    result.keys |= {f"parallelism.pipeline_parallel_{name}": value for name, value in keys.items()}


def _stages(given: Given, result: Translation) -> int | None:
    """Number of stages that the file asks for; None: the schedule's default."""
    points = given["parallelism.pipeline_parallel_split_points"]
    parts = given["parallelism.module_fqns_per_model_part"]
    per_stage = given["parallelism.pipeline_parallel_layers_per_stage"]
    if points:
        return len(list_of(points)) + 1
    if parts:
        return len(parts)
    if not per_stage or "model.flavor" not in result.keys:
        return None
    keys = result.keys
    _, args = find_model(keys["model.name"], keys["model.flavor"], keys.get("model.args"))
    ends = (f"parallelism.pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last"))
    return -(-(args.n_layers + sum(given[end] for end in ends)) // per_stage)
