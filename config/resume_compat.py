"""Configuration keys that a resumed run may change. Each key is in one of three classes.

frozen: a change raises ``ConfigError``. Changes of the others are logged. recorded: may affect
training from then on. free: affects neither training nor validation.
"""

import json
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from config.errors import ConfigError
from config.hub_names import is_hub_name
from config.job_config import JobConfig


def _keys(text: str) -> frozenset[str]:
    """Parse lines of ``table: key key`` to ``{"table.key", ...}``."""
    lines = [line.split() for line in text.strip().splitlines()]
    return frozenset(table.replace(":", ".") + name for table, *names in lines for name in names)


FROZEN = _keys("""
    model: name flavor vocab_size
    data: source subset revision text_key packing document_mask validation_percent
    training: global_batch_size dtype
    optimizer: name state_dtype param_remainders
    debug: seed
""")
# Documents and tokenizer may move, because the data's state has fingerprints of their contents.
# model.args may be spelled in another way: ``changed_arguments`` compares what results.
RECORDED = _keys("""
    data: path args sources tokenizer bos eos on_bad_record
    model: args
    training: steps seq_len local_batch_size batch_size_ramp max_norm
    training: mixed_precision_param mixed_precision_reduce
    optimizer: args lr beta1 beta2 eps weight_decay muon_momentum
    lr_scheduler: warmup_steps decay_ratio decay_type args min_lr_factor total_steps
    parallelism: data_parallel data_parallel_replicate_degree data_parallel_shard_degree
    parallelism: tensor_parallel_degree tensor_parallel_async context_parallel_degree
    parallelism: context_parallel_method pipeline_parallel_degree pipeline_parallel_schedule
    parallelism: pipeline_parallel_microbatch_size pipeline_parallel_stages_per_rank
    parallelism: pipeline_parallel_first_stage_less_layers
    parallelism: pipeline_parallel_last_stage_less_layers
    parallelism: expert_parallel_degree fsdp_reshard_after_forward fsdp_reduce_gradients
    parallelism: fsdp_forward_prefetch fsdp_backward_prefetch fsdp_cpu_offload
    activation_checkpoint: mode selective memory_budget
    compile: enable backend cuda_graphs
    float8: recipe skip skip_small emulate
    numerics: on_nonfinite max_skipped on_spike spike_window spike_sigmas max_rollbacks
    experts: balance_loss balance_bias_rate
    validation: sources steps
    debug: deterministic
""")
FREE = _keys("""
    job: name output_dir
    data: prefetch max_bad_records
    training: gc_freq
    checkpoint: enable interval keep_latest_k keep_every async_mode max_unsaved_steps
    checkpoint: initial_load_path
    numerics: replica_check_freq
    validation: enable freq sample_tokens sample_prompt sample_prompts
    metrics: log_freq enable_ledger straggler_window layer_stats_freq
    metrics: trackers project peak_tflops
    profiling: enable_trace trace_freq enable_memory_snapshot
    comm: init_timeout_seconds train_timeout_seconds
""")
DEFAULT_HINT = (
    "cannot change on resume: to start from these weights, set a new job.name, and"
    " checkpoint.initial_load_path to the checkpoint"
)
# Without the checkpoint's weights, which another model or tokenizer may not fit.
NEW_JOB_HINT = "cannot change on resume: set a new job.name"
# Hints for keys whose values can change although nobody edited them.
HINTS = {
    "training.global_batch_size": "if absent, it follows the number of ranks: set it to the old"
    " value, and training.local_batch_size to fit these ranks. It"
    f" {DEFAULT_HINT}",
    "data.revision": "a branch or tag follows the Hub: leave the key out, or set it to the old"
    f" value. It {DEFAULT_HINT}",
}
# Derived from training.seq_len and experts.balance_loss, which may change.
DERIVED_ARGUMENTS = {"max_seq_len", "balance_weight"}


@dataclass(frozen=True)
class Changes:
    """Changed keys by class, one message each, such as ``optimizer.lr: 0.003 to 0.001``."""

    frozen: tuple[str, ...]
    recorded: tuple[str, ...]
    free: tuple[str, ...]
    gone: tuple[str, ...]
    """Keys of the checkpoint that this version lacks; they are not compared."""

    def raise_if_frozen_changed(self, folder: Path) -> None:
        """Raise ``ConfigError`` if a frozen key changed of the run in ``folder``."""
        if self.frozen:
            keys = (change.partition(":")[0] for change in self.frozen)
            hints = [HINTS.get(key, DEFAULT_HINT) for key in keys]
            changes = [f"{c}; {hint}" for c, hint in zip(self.frozen, hints, strict=True)]
            raise ConfigError([f"job.name: {folder} has a run with other settings", *changes])


def compare(saved: dict[str, Any], now: JobConfig) -> Changes:
    """Compare ``saved``, a checkpoint's resolved configuration as a nested dict, with ``now``.

    A key that ``saved`` lacks counts as its default: it is newer, or was omitted as None.
    """
    before, after = by_key(JobConfig().model_dump()), by_key(now.model_dump())
    known = by_key(saved)
    before |= known
    changed = {
        key: f"{key}: {shown(before[key])} to {shown(value)}"
        for key, value in after.items()
        if before[key] != value
    }
    # Its contents are compared as those of paths are, by ``changed_arguments`` and fingerprints.
    moved = {key for key in changed if _is_other_commit(before[key], after[key])}
    frozen, recorded, free = (
        tuple(text for key, text in changed.items() if key in keys)
        for keys in (FROZEN - moved, RECORDED | moved & FROZEN, FREE)
    )
    gone = tuple(f"{key}: {shown(known[key])}" for key in known if key not in after)
    return Changes(frozen, recorded, free, gone)


def _is_other_commit(before: Any, after: Any) -> bool:
    """True if both are names of one repository of the hub, ``hf:OWNER/NAME@COMMIT``."""
    one, other = (str(value).partition("@")[0] for value in (before, after))
    return one == other and is_hub_name(one)


def changed_arguments(saved: dict[str, Any], now: Any) -> list[str]:
    """Differences between a checkpoint's model args, a dict, and ``now``, a dataclass.

    Many args change no shape (heads, rotary base, epsilon), so no other check would notice. A
    newer field that ``saved`` lacks counts as its default.
    """
    changed = []
    for field in fields(now):
        after = getattr(now, field.name)
        before = saved.get(field.name, None if field.default is MISSING else field.default)
        if is_dataclass(after) and isinstance(before, dict):
            changed += [f"{field.name}.{text}" for text in changed_arguments(before, after)]
        elif field.name not in DERIVED_ARGUMENTS and _in_json(before) != _in_json(after):
            changed.append(f"{field.name}: {shown(before)} to {shown(after)}")
    gone = saved.keys() - {field.name for field in fields(now)}
    return changed + [f"{name}: {shown(saved[name])} no longer exists" for name in sorted(gone)]


def _in_json(value: Any) -> Any:
    """Return the value as a checkpoint has it, where a tuple is a list."""
    return json.loads(json.dumps(value, default=asdict))


def by_key(config: dict[str, Any]) -> dict[str, Any]:
    """Flatten tables to ``section.name`` keys. An unknown top-level value keeps its key."""
    keys: dict[str, Any] = {}
    for section, table in config.items():
        is_table = isinstance(table, dict)
        keys |= {f"{section}.{k}": v for k, v in table.items()} if is_table else {section: table}
    return keys


def shown(value: Any) -> str:
    """Return the text of a key's value in messages."""
    if value is None:
        return "unset"
    return str(value).lower() if isinstance(value, bool) else repr(value)
