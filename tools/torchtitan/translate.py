"""Translate a TOML file of torchtitan into a configuration of ours that trains the same.

The facts about torchtitan's keys are in ``tools/torchtitan/keys.py``; here is what more than one
of them decides.
"""

import re
from collections.abc import Mapping
from typing import Any

from config import JobConfig
from config.paths import literal_path
from models import MODEL_SPECS
from tools.torchtitan.given import LAST_MONTH, Given, Translation, list_of, read
from tools.torchtitan.keys import BY_NAME, FLOAT8, KEYS
from tools.torchtitan.models import model_keys
from tools.torchtitan.parallelism import translate_pipeline, translate_ranks

MAX_STEPS = 10**12
# Where torchtitan's datasets are: the type of source and the path.
DATASETS = {
    "c4": ("c4", ""),
    "c4_test": ("files", "tests/assets/c4_test/*.json"),
    "c4_mini": ("files", "torchtitan/datasets/c4_mini/*.json"),
    "alpaca": ("huggingface", "tatsu-lab/alpaca"),
    "minipile": ("huggingface", "JeanKaddour/minipile"),
    "openwebtext": ("huggingface", "Skylion007/openwebtext"),
}
FLOAT8_CONVERTERS = ("float8", FLOAT8, "quantize.dense.float8")


def translate(tables: Mapping[str, Any], run_name: str) -> Translation:
    """Translate ``tables``, a parsed TOML file of torchtitan. Raises nothing: see ``problems``."""
    result = Translation()
    given = read(tables, result)
    result.keys["job.name"] = re.sub(r"[^A-Za-z0-9_.-]|^[.-]", "_", run_name)[:64] or "default"
    result.keys["job.output_dir"] = literal_path(given["job.dump_folder"])
    if "job.description" in given:
        result.description = given["job.description"]
    _translate_rows(given, result)
    for part in (
        _translate_model, _translate_data, _translate_precision, _translate_optimizer,
        _translate_schedule, translate_ranks, translate_pipeline, _translate_recompute,
        _translate_float8, _translate_checkpoint, _translate_observation,
    ):  # fmt: skip
        part(given, result)
    for name, old in given.written.items():
        key = BY_NAME[name]
        is_lost = key.way == "derived" and key.to != "" and key.to not in result.keys
        if is_lost and given[name] != key.default and not result.mentions(old):
            result.drop(old, "without effect in this file")
    return result


def _translate_rows(given: Given, result: Translation) -> None:
    """Translate the keys that depend on no other."""
    for key in KEYS:
        value, old = given[key.name], given.written.get(key.name, key.name)
        if key.way == "copied" and (key.name in given or value != _default_of(key.to)):
            result.keys[key.to] = value
        elif key.way == "dropped" and key.name in given:
            result.drop(old, key.remark)
        elif key.way == "rejected" and value not in (key.default, "", []):
            result.problems.append(f"{old} = {value!r}: {key.remark}")


def _default_of(key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(JobConfig.model_fields[section].default, name)


def _translate_model(given: Given, result: Translation) -> None:
    try:
        result.keys |= model_keys(given["model.name"], given["model.flavor"], given.month)
    except ValueError as error:
        result.problems.append(str(error))
    norm = given["model.norm_type"]
    if norm not in ("rmsnorm", "fused_rmsnorm", "compiled_rmsnorm"):
        result.problems.append(f"model.norm_type = {norm!r}: only RMSNorm is supported")
    mask = given["model.attn_mask_type"]
    if mask == "block_causal":
        result.keys["data.document_mask"] = True
    elif mask != "causal":
        result.problems.append(f"model.attn_mask_type = {mask!r}: causal or block_causal")
    if result.keys.get("model.name") == "qwen3_moe":
        # Its Qwen3 computed no balancing loss, and never updated the router's bias.
        result.keys |= {"experts.balance_loss": 0.0, "experts.balance_bias_rate": 0.0}
    if given["model.name"] == "llama3" or given.month < LAST_MONTH:
        result.notes.append(
            f"model: as torchtitan had it in {given.month}, the last month with all keys of this"
            " file. It scales Llama 3's rotary frequencies since October 2025 (before:"
            " model.args.rope_scaling = {}), and its debug models grew."
        )


def _translate_data(given: Given, result: Translation) -> None:
    name, path = given["training.dataset"].lower(), given["training.dataset_path"]
    if name not in DATASETS:
        result.problems.append(
            f"training.dataset: {name!r} is not one of {', '.join(DATASETS)}: remove it, and add a"
            " [data] table to the result; see docs/howto/data.md"
        )
        return
    source, where = DATASETS[name]
    if path is not None:
        folder = literal_path(path.rstrip("/") or "/")
        pattern = "en/c4-train.*.json.gz" if name == "c4" else "*.json"
        source, where = "files", f"{folder}/{pattern}"
        result.notes.append(
            f"data.path: the files of training.dataset_path are taken to be {pattern}"
        )
    result.keys["data.source"] = source
    if where:
        result.keys["data.path"] = where
    tokenizer = given["model.tokenizer_path"] or given["model.hf_assets_path"]
    if "model.hf_assets_path" in given:
        tokenizer = given["model.hf_assets_path"]
    result.keys["data.tokenizer"] = literal_path(tokenizer)
    if source == "c4":
        return
    if not given["validation.enable"]:
        # Nothing is held out there.
        result.keys["data.validation_percent"] = 0.0
    else:
        result.notes.append("data.validation_percent: these documents are not trained on")


def _translate_precision(given: Given, result: Translation) -> None:
    size = given["training.global_batch_size"]
    if size != -1:
        result.keys["training.global_batch_size"] = size
    norm = given["training.max_norm"]
    result.keys["training.max_norm"] = norm
    if not 0 < norm < float("inf"):
        result.problems.append(f"training.max_norm = {norm}: write 1e9 for no clipping")
    dtype, param = given["training.dtype"], given["training.mixed_precision_param"]
    result.keys["training.dtype"] = dtype
    if dtype == "float32":
        result.keys["training.mixed_precision_param"] = param
        reduce = given["training.mixed_precision_reduce"]
        result.keys["training.mixed_precision_reduce"] = reduce
    elif param != dtype:
        result.problems.append(
            f"training.mixed_precision_param = {param!r}: with training.dtype = {dtype!r} the"
            " weights' dtype is that of the computation"
        )
    if dtype == "bfloat16":
        # Its AdamW rounds updates of bfloat16 weights to them.
        result.keys["optimizer.param_remainders"] = False


def _translate_optimizer(given: Given, result: Translation) -> None:
    name, decay = given["optimizer.name"], given["optimizer.weight_decay"]
    result.keys["optimizer.name"] = "adamw"
    if name != "AdamW" and not (name == "Adam" and decay == 0):
        result.problems.append(
            f"optimizer.name = {name!r}: AdamW is what there is, and muon; without weight_decay,"
            " Adam is AdamW"
        )
    if decay > 0:
        result.notes.append(
            "optimizer.weight_decay: torchtitan decays norms and embeddings too, this only matrices"
        )


def _translate_schedule(given: Given, result: Translation) -> None:
    """Write the schedule such that each step has the same factor.

    torchtitan's last step is one step before the end of the decay. Until March 2025 the first step
    after warmup was the peak, since then also the last step of warmup.
    """
    total = given["lr_scheduler.total_steps"]
    steps = given["training.steps"] if total is None else total
    is_old = "training.warmup_steps" in given or (
        given.month <= "2025-03" and "lr_scheduler.warmup_steps" not in given
    )
    key = "training.warmup_steps" if is_old else "lr_scheduler.warmup_steps"
    warmup, ratio = given[key], given["lr_scheduler.decay_ratio"]
    decay_ratio = ("lr_scheduler.decay_ratio", ratio or 0.0)
    for name, value in (("training.steps", steps), (key, warmup), decay_ratio):
        if not 0 <= value < MAX_STEPS:
            result.problems.append(f"{name} = {value!r}: out of range")
            return
    if is_old:
        decay = max(0, steps - warmup)
        warmup += 1
    else:
        warmup = min(warmup, steps)
        decay = steps - warmup
        decay = decay if ratio is None else min(decay, round(steps * ratio))
    result.keys["lr_scheduler.warmup_steps"] = warmup
    result.keys["lr_scheduler.decay_ratio"] = _shortest_ratio(decay, steps + 1)
    result.keys["lr_scheduler.total_steps"] = steps + 1
    result.notes.append(
        "lr_scheduler: each step's lr is torchtitan's; with other training.steps, translate again"
    )


def _shortest_ratio(part: int, whole: int) -> float:
    """Shortest decimal whose product with ``whole`` rounds to ``part``."""
    ratios = (round(part / whole, digits) for digits in range(1, 17))
    return next(ratio for ratio in ratios if round(ratio * whole) == part and ratio <= 1)


def _translate_recompute(given: Given, result: Translation) -> None:
    mode = given["activation_checkpoint.mode"]
    option = given["activation_checkpoint.selective_ac_option"]
    if "training.enable_selective_ac" in given:
        mode, option = ("selective" if given["training.enable_selective_ac"] else "full"), "op"
    result.keys["activation_checkpoint.mode"] = mode
    if mode == "selective":
        is_count = option.isascii() and option.isdecimal() and int(option) > 0
        result.keys["activation_checkpoint.selective"] = int(option) if is_count else option
    elif mode == "memory_budget":
        budget = given["activation_checkpoint.memory_budget"]
        result.keys["activation_checkpoint.memory_budget"] = budget
    if given["compile.enable"]:
        result.keys["compile.backend"] = given["compile.backend"]


def _translate_float8(given: Given, result: Translation) -> None:
    converters = list_of(given["model.converters"] or [])
    others = [name for name in converters if name not in FLOAT8_CONVERTERS]
    if others:
        result.problems.append(
            f"model.converters = {others}: only the float8 of linear layers is supported"
        )
    old = given["training.fp8_linear"], given["float8.enable_float8_linear"]
    if "delayed" in old:
        result.problems.append("training.fp8_linear: only dynamic scaling is supported")
    if len(converters) == len(others) and not any(old):
        for name in given.written:
            if name.startswith(FLOAT8) and BY_NAME[name].way == "derived":
                result.drop(given.written[name], "without effect, because its converter is off")
        return
    recipe = given[f"{FLOAT8}.recipe_name"] or "tensorwise"
    if recipe not in ("tensorwise", "rowwise"):
        result.problems.append(
            f"{given.written[f'{FLOAT8}.recipe_name']} = {recipe!r}: tensorwise or rowwise"
        )
        return
    skipped = list_of(given[f"{FLOAT8}.filter_fqns"] or [])
    result.keys["float8.recipe"] = recipe
    result.keys["float8.skip_small"] = "auto_filter_small_kn" in skipped
    # The output layer and routers are never converted here.
    ours = [
        name
        for entry in skipped
        if entry not in ("output", "auto_filter_small_kn") and "router" not in entry.split(".")
        for name in _whole_names(entry, result)
    ]
    if ours:
        result.keys["float8.skip"] = ours
    if given[f"{FLOAT8}.emulate"]:
        result.keys["float8.emulate"] = True
    if "output" not in skipped:
        result.notes.append("float8.skip: the output layer is never converted")


def _whole_names(entry: str, result: Translation) -> list[str]:
    """Parts of FQNs that ``entry`` is in: torchtitan's layers.1 is also in layers.10."""
    layer = re.search(r"(?:^|\.)layers\.(\d+)$", entry)
    if layer is None or "model.name" not in result.keys:
        return [entry]
    flavor = MODEL_SPECS[result.keys["model.name"]].flavors[result.keys["model.flavor"]]
    n_layers = result.keys.get("model.args", {}).get("n_layers", flavor.n_layers)
    before = entry.removesuffix(layer[1])
    return [f"{before}{i}" for i in range(n_layers) if str(i).startswith(layer[1])]


def _translate_checkpoint(given: Given, result: Translation) -> None:
    is_enabled = given["checkpoint.enable"]
    if given.written.get("checkpoint.folder") == "training.checkpoint_folder":
        # Before there was a key to enable them, a folder did.
        is_enabled = result.keys["checkpoint.enable"] = given["checkpoint.folder"] != ""
    if is_enabled:
        if given["checkpoint.interval_type"] != "steps":
            result.problems.append("checkpoint.interval_type: set checkpoint.interval in steps")
        result.keys["checkpoint.interval"] = given["checkpoint.interval"]
        result.keys["checkpoint.keep_latest_k"] = given["checkpoint.keep_latest_k"]
        mode = given["checkpoint.async_mode"]
        result.keys["checkpoint.async_mode"] = "async" if mode.startswith("async") else mode
    path = given["checkpoint.initial_load_path"]
    if not path and given["checkpoint.initial_load_in_hf"]:
        path = given["model.hf_assets_path"]
    # torchtitan loads nothing without checkpoint.enable; here the weights would be loaded.
    if not path or not is_enabled:
        return
    result.keys["checkpoint.initial_load_path"] = literal_path(path)
    if not given["checkpoint.initial_load_in_hf"]:
        result.problems.append(
            "checkpoint.initial_load_path: a checkpoint of torchtitan cannot be read: convert it"
            " to Hugging Face's format there, and set initial_load_in_hf = true"
        )


def _translate_observation(given: Given, result: Translation) -> None:
    """Write what decides when something is seen, where the file says so or enables it."""
    if "metrics.enable_tensorboard" in given:
        trackers = ["tensorboard"] if given["metrics.enable_tensorboard"] else []
        result.keys["metrics.trackers"] = trackers
    for name in ("comm.init_timeout_seconds", "comm.train_timeout_seconds", "debug.seed"):
        if name in given:
            result.keys[name] = given[name]
    if given["profiling.enable_profiling"] or given["profiling.enable_memory_snapshot"]:
        result.keys["profiling.trace_freq"] = given["profiling.profile_freq"]
    if given["validation.enable"]:
        result.keys["validation.freq"] = given["validation.freq"]
        steps = given["validation.steps"]
        result.keys["validation.steps"] = "all" if steps == -1 else steps
        if steps != -1:
            result.notes.append(
                "validation.steps: each is a global batch here, there one batch of each rank"
            )
