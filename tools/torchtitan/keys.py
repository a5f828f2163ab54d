"""The keys of torchtitan's TOML files, from the first of 2024 to the last of February 2026.

``python -m tools.torchtitan.keys`` writes their table into docs/reference/torchtitan_keys.md.
Names, meanings and defaults: torchtitan/config_manager.py and torchtitan/config/job_config.py in
the history of github.com/pytorch/torchtitan, whose release 0.2.2 is the last with TOML files.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

NAMES_IN_A_CELL = 2
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "torchtitan_keys.md"
HEADING = "## The keys\n"


@dataclass(frozen=True)
class Key:
    name: str
    default: Any
    """Of release 0.2.2; of the last release with the key if that lacks it. None: unset."""
    way: Literal["copied", "derived", "dropped", "rejected"]
    """copied: to the key ``to``. derived: by ``translate.py``. dropped: changes nothing of what
    is trained. rejected: any value but the default."""
    to: str = ""
    remark: str = ""
    """Way of deriving it; or why it is not translated, and what to do."""
    kind: type | tuple[type, ...] = str
    """Type of its values where the default is None."""
    until: str = ""
    """Last month in which torchtitan had the key, in ISO format; "": February 2026."""

    @property
    def kinds(self) -> tuple[type, ...]:
        """Types that its values may have."""
        kind = self.kind if self.default is None else type(self.default)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        return (*kinds, int) if float in kinds else kinds


def _copied(name: str, default: Any, to: str = "", remark: str = "", **more: Any) -> Key:
    return Key(name, default, "copied", to or name, remark, **more)


def _derived(name: str, default: Any, to: str, remark: str = "", **more: Any) -> Key:
    return Key(name, default, "derived", to, remark, **more)


def _dropped(remark: str, **names: Any) -> list[Key]:
    """Keys with their defaults; in ``names``, ``__`` stands for a dot."""
    return [Key(_dotted(name), value, "dropped", "", remark) for name, value in names.items()]


def _old(remark: str, until: str, **names: Any) -> list[Key]:
    """Dropped keys of old releases."""
    return [
        Key(_dotted(name), value, "dropped", "", remark, until=until)
        for name, value in names.items()
    ]


def _rejected(remark: str, until: str = "", kind: type = str, **names: Any) -> list[Key]:
    return [
        Key(_dotted(name), value, "rejected", "", remark, kind=kind, until=until)
        for name, value in names.items()
    ]


def _dotted(name: str) -> str:
    return name.replace("__", ".")


FLOAT8 = "quantize.linear.float8"
KEYS: tuple[Key, ...] = (
    # What a run is
    _derived("job.dump_folder", "./outputs", "job.output_dir",
             "the run's folder in it is job.name, the name of the TOML file"),
    _derived("job.description", "default job", "", "a comment in the file"),
    *_dropped("config.toml in the run's folder has every key of the run", job__print_config=False,
              job__save_config_file="", job__config_file=""),
    *_old("only named torchtitan's own tests", "2025-08", job__use_for_integration_test=False,
          metrics__use_for_integration_test=False),
    *_rejected("extends torchtitan itself: see docs/howto/add_a_model.md",
               job__custom_config_module="",
               experimental__custom_import=""),
    # Model and data
    _derived("model.name", "llama3", "model.name", "Llama 2, Llama 3 and Qwen3, dense and MoE"),
    _derived("model.flavor", "debugmodel", "model.flavor",
             "with [model.args] and model.vocab_size where torchtitan's flavor differs; flavors"
             " with a block-causal mask set data.document_mask"),
    _derived("model.hf_assets_path", "./tests/assets/tokenizer", "data.tokenizer"),
    _derived("model.tokenizer_path", None, "data.tokenizer"),
    _derived("model.converters", None, "float8.recipe",
             '"float8" and "quantize.linear.float8"; others are not supported', kind=(list, str)),
    *_dropped("the log says what was converted", model__print_after_conversion=False),
    _derived("model.norm_type", "rmsnorm", "",
             "rmsnorm and its fused forms are what there is; other norms are not supported",
             until="2025-04"),
    _derived("model.attn_mask_type", "causal", "data.document_mask", '"block_causal" sets it',
             until="2025-04"),
    *_old("the kernel of attention is chosen by the mask and the device", "2025-04",
          model__use_flex_attn=False),
    _derived("training.dataset", "c4_test", "data.source", "c4, c4_test, c4_mini, alpaca,"
             " minipile, openwebtext; for others write a [data] table"),
    _derived("training.dataset_path", None, "data.path"),
    *_dropped("a thread prepares data.prefetch microbatches", training__dataloader__num_workers=0,
              training__dataloader__persistent_workers=False,
              training__dataloader__pin_memory=False, training__dataloader__prefetch_factor=2,
              validation__dataloader__num_workers=0,
              validation__dataloader__persistent_workers=False,
              validation__dataloader__pin_memory=False, validation__dataloader__prefetch_factor=2),
    # Training
    _copied("training.steps", 10000),
    _copied("training.seq_len", 2048),
    _copied("training.local_batch_size", 8),
    _derived("training.global_batch_size", -1, "training.global_batch_size",
             "-1, one microbatch on every rank, is the key's absence"),
    _derived("training.max_norm", 1.0, "training.max_norm"),
    _derived("training.dtype", "float32", "training.dtype"),
    _derived("training.mixed_precision_param", "bfloat16", "training.mixed_precision_param"),
    _derived("training.mixed_precision_reduce", "float32", "training.mixed_precision_reduce"),
    _copied("training.gc_freq", 50),
    *_dropped("look for cycles with Python's gc.DEBUG_SAVEALL", training__gc_debug=False),
    _derived("optimizer.name", "AdamW", "optimizer.name",
             "Adam only without weight decay, where it is the same"),
    _copied("optimizer.lr", 8e-4),
    _copied("optimizer.beta1", 0.9),
    _copied("optimizer.beta2", 0.95),
    _copied("optimizer.eps", 1e-8),
    _copied("optimizer.weight_decay", 0.1,
            remark="reaches matrices only, not norms and embeddings"),
    *_dropped("the fused implementation is always used", optimizer__implementation="fused"),
    *_old("the fused implementation is always used", "2025-02", optimizer__fused=False),
    *_rejected("updates weights without clipping gradients; remove it",
               optimizer__early_step_in_backward=False),
    _derived("lr_scheduler.warmup_steps", 200, "lr_scheduler.warmup_steps",
             "at most the schedule's steps"),
    _derived("training.warmup_steps", 200, "lr_scheduler.warmup_steps",
             "one step more, then a linear decay: the schedule until March 2025", until="2025-03"),
    *_rejected("set training.warmup_steps", "2024-02", kind=float, training__warmup_pct=0.2),
    _derived("lr_scheduler.decay_ratio", None, "lr_scheduler.decay_ratio",
             "of total_steps, such that each step has the same lr", kind=float),
    _copied("lr_scheduler.decay_type", "linear"),
    _copied("lr_scheduler.min_lr_factor", 0.0),
    _derived("lr_scheduler.total_steps", None, "lr_scheduler.total_steps",
             "one step more, because torchtitan's last step is not yet at the minimum", kind=int),
    # Parallelism
    _derived("parallelism.data_parallel_replicate_degree", 1,
             "parallelism.data_parallel_replicate_degree",
             'with data_parallel_shard_degree = 1: data_parallel = "ddp"'),
    _derived("parallelism.data_parallel_shard_degree", -1,
             "parallelism.data_parallel_shard_degree"),
    _derived("training.data_parallel_type", "fsdp", "parallelism.data_parallel", until="2024-09"),
    _copied("parallelism.fsdp_reshard_after_forward", "default"),
    _copied("training.enable_cpu_offload", False, "parallelism.fsdp_cpu_offload"),
    _copied("parallelism.tensor_parallel_degree", 1),
    _derived("parallelism.enable_async_tensor_parallel", False,
             "parallelism.tensor_parallel_async", "where it has an effect: tensor parallel,"
             " compiled, microbatches of several sequences"),
    *_dropped("the loss is always computed in shards of the vocabulary",
              parallelism__disable_loss_parallel=False),
    *_old("the loss is always computed in shards of the vocabulary", "2024-12",
          training__enable_loss_parallel=True),
    _copied("parallelism.context_parallel_degree", 1),
    _derived("parallelism.context_parallel_rotate_method", "allgather",
             "parallelism.context_parallel_method",
             'always "allgather", which balances like torchtitan; see also "ulysses"'),
    *_dropped("causal attention is always balanced head to tail",
              parallelism__context_parallel_load_balancer="headtail"),
    _copied("parallelism.pipeline_parallel_degree", 1),
    _derived("parallelism.pipeline_parallel_schedule", "1F1B",
             "parallelism.pipeline_parallel_schedule",
             "1F1B, GPipe, Interleaved1F1B, InterleavedZeroBubble"),
    _derived("parallelism.pipeline_parallel_microbatch_size", 1,
             "parallelism.pipeline_parallel_microbatch_size"),
    _derived("parallelism.pipeline_parallel_microbatches", None,
             "parallelism.pipeline_parallel_microbatch_size", "local_batch_size over this number",
             kind=int, until="2025-04"),
    _derived("parallelism.pipeline_parallel_layers_per_stage", None,
             "parallelism.pipeline_parallel_stages_per_rank", kind=int),
    _derived("parallelism.pipeline_parallel_split_points", None,
             "parallelism.pipeline_parallel_stages_per_rank",
             "their number; layers are assigned to stages by weight", kind=(list, str),
             until="2025-10"),
    _derived("parallelism.module_fqns_per_model_part", None,
             "parallelism.pipeline_parallel_stages_per_rank",
             "their number; layers are assigned to stages by weight", kind=list),
    _derived("parallelism.pipeline_parallel_first_stage_less_layers", 1,
             "parallelism.pipeline_parallel_first_stage_less_layers"),
    _derived("parallelism.pipeline_parallel_last_stage_less_layers", 1,
             "parallelism.pipeline_parallel_last_stage_less_layers"),
    *_rejected("schedules from files are not supported; name one of pipeline_parallel_schedule",
               parallelism__pipeline_parallel_schedule_csv=""),
    *_rejected("remove it: the only way to split is manual", "2024-08",
               experimental__pipeline_parallel_split_mode="manual"),
    _derived("parallelism.expert_parallel_degree", 1, "parallelism.expert_parallel_degree",
             "for MoE models; has no effect on others"),
    *_dropped("experts are never tensor parallel", parallelism__expert_tensor_parallel_degree=1),
    *_dropped("experts use all-to-all, and layers run in the schedule's order",
              parallelism__expert_parallel_comm_backend="standard",
              parallelism__pipeline_parallel_expert_parallel_overlap=True),
    *_dropped("backward is not compiled separately",
              parallelism__enable_compiled_autograd=False),
    *_old("sharding is by DTensor in any case", "2024-09", experimental__torch_spmd=False),
    # Recomputation, compilation, float8
    _derived("activation_checkpoint.mode", "selective", "activation_checkpoint.mode"),
    _derived("activation_checkpoint.selective_ac_option", "2", "activation_checkpoint.selective",
             'an integer or "op"'),
    _derived("activation_checkpoint.memory_budget", 0.5, "activation_checkpoint.memory_budget"),
    _derived("training.enable_selective_ac", False, "activation_checkpoint.mode",
             until="2024-03"),
    *_dropped("recomputation changes no result; it stops early, and there is no dropout",
              activation_checkpoint__per_op_sac_force_recompute_mm_shapes_by_fqns=[],
              activation_checkpoint__early_stop=False,
              activation_checkpoint__visualize_memory_budget_pareto=False,
              activation_checkpoint__preserve_rng_state=True,
              activation_checkpoint__determinism_check="default",
              activation_checkpoint__debug=False),
    _copied("compile.enable", False),
    _derived("compile.backend", "inductor", "compile.backend"),
    *_dropped("blocks and loss are compiled together", compile__components=["model", "loss"]),
    _derived(f"{FLOAT8}.recipe_name", None, "float8.recipe",
             "tensorwise where it is unset; rowwise_with_gw_hp is not supported"),
    _derived(f"{FLOAT8}.filter_fqns", None, "float8.skip",
             '"output" is never converted; "auto_filter_small_kn" is float8.skip_small',
             kind=(list, str)),
    _derived(f"{FLOAT8}.emulate", False, "float8.emulate"),
    _derived("float8.enable_float8_linear", False, "float8.recipe", until="2025-02",
             kind=(bool, str)),
    _derived("training.fp8_linear", None, "float8.recipe", until="2024-07", kind=(bool, str)),
    *_dropped("weights are gathered in float8 where that is the same",
              **{f"{FLOAT8.replace('.', '__')}__enable_fsdp_float8_all_gather": False,
                 f"{FLOAT8.replace('.', '__')}__precompute_float8_dynamic_scale_for_fsdp": False}),
    *_old("memory is PyTorch's matter", "2025-07", **{
        f"{FLOAT8.replace('.', '__')}__force_recompute_fp8_weight_in_bwd": False}),
    *_rejected("only dynamic scaling is supported", "2024-12",
               float8__scaling_type_input="dynamic", float8__scaling_type_weight="dynamic",
               float8__scaling_type_grad_output="dynamic"),
    # Checkpoints and validation
    _copied("checkpoint.enable", False),
    _derived("checkpoint.interval", 500, "checkpoint.interval"),
    _derived("checkpoint.interval_type", "steps", "", "seconds are not supported",
             until="2025-02"),
    _derived("checkpoint.keep_latest_k", 10, "checkpoint.keep_latest_k"),
    _derived("checkpoint.async_mode", "disabled", "checkpoint.async_mode",
             'async_with_pinned_mem is "async"'),
    _derived("checkpoint.initial_load_path", None, "checkpoint.initial_load_path",
             "a Hugging Face folder; export a checkpoint of torchtitan to that format first"),
    _derived("checkpoint.initial_load_in_hf", False, "checkpoint.initial_load_path"),
    *_rejected("load the weights alone: a run of another program cannot be resumed",
               checkpoint__initial_load_model_only=True),
    *_rejected("dequantize the folder first", checkpoint__initial_load_in_hf_quantized=False),
    *_rejected("a run resumes from its newest checkpoint; ./shardloom rollback goes back",
               checkpoint__load_step=-1),
    *_rejected("checkpoint.initial_load_path loads the weights alone", kind=list,
               checkpoint__exclude_from_loading=None),
    *_dropped("checkpoints are in checkpoints/ of the run's folder",
              checkpoint__folder="checkpoint"),
    *_dropped("every checkpoint is complete; ./shardloom convert exports weights",
              checkpoint__last_save_model_only=True, checkpoint__last_save_in_hf=False,
              checkpoint__export_dtype="float32"),
    *_dropped("the last step is always saved, and the first weights do not depend on the mesh",
              checkpoint__enable_first_step_checkpoint=False,
              checkpoint__create_seed_checkpoint=False,
              checkpoint__enable_ft_dataloader_checkpoints=True),
    *_dropped("set checkpoint.interval to more than training.steps", checkpoint__load_only=False),
    _copied("validation.enable", False),
    _derived("validation.freq", 10, "validation.freq"),
    _derived("validation.steps", -1, "validation.steps", '-1 is "all"'),
    *_dropped("c4 has held-out documents, of other data some are held out; see docs/howto/data.md",
              validation__dataset="c4_validation", validation__dataset_path="",
              validation__local_batch_size=8,
              validation__seq_len=2048),
    # What is seen
    _copied("metrics.log_freq", 10),
    _derived("metrics.enable_tensorboard", False, "metrics.trackers", "if given"),
    *_dropped("metrics.jsonl and tensorboard/ are in the run's folder",
              metrics__save_tb_folder="tb", metrics__save_for_all_ranks=False,
              metrics__disable_color_printing=False),
    *_dropped('metrics.trackers = ["tensorboard", "wandb"] has both', metrics__enable_wandb=False),
    *_old("metrics.jsonl and tensorboard/ are in the run's folder", "2025-03",
          metrics__rank_0_only=True),
    *_old("metrics.jsonl and tensorboard/ are in the run's folder", "2024-12",
          metrics__enable_color_printing=False),
    _copied("profiling.enable_profiling", False, "profiling.enable_trace"),
    _derived("profiling.profile_freq", 10, "profiling.trace_freq", "with enable_profiling"),
    _copied("profiling.enable_memory_snapshot", False),
    *_dropped("traces and snapshots are in traces/ of the run's folder and cover two steps",
              profiling__save_traces_folder="profile_traces",
              profiling__save_memory_snapshot_folder="memory_snapshot",
              profiling__profiler_active=1, profiling__profiler_warmup=3),
    _derived("comm.init_timeout_seconds", 300, "comm.init_timeout_seconds", "if given"),
    _derived("comm.train_timeout_seconds", 100, "comm.train_timeout_seconds", "if given"),
    *_dropped("the launcher turns the flight recorder on; see docs/troubleshooting.md",
              comm__trace_buf_size=20000, comm__save_traces_folder="comm_traces",
              comm__save_traces_file_prefix="rank_"),
    *_rejected("ranks are real processes: ./run_train.sh runs any mesh on CPUs",
               comm__mode="default"),
    _derived("debug.seed", None, "debug.seed", "unset is the default 0, not a random seed",
             kind=int),
    _copied("debug.deterministic", False),
    *_dropped("an operation without a deterministic form is an error",
              debug__deterministic_warn_only=False),
    *_rejected("routes tokens without the router; remove it", debug__moe_force_load_balance=False),
    *_dropped("./shardloom plan shows the memory, without a GPU", memory_estimation__enable=False,
              memory_estimation__disable_fake_mode=False),
)  # fmt: skip
BY_NAME = {key.name: key for key in KEYS}
# Tables of a feature that is not supported, the key that turns it on, and what to do.
FEATURES = {
    "fault_tolerance": ("enable", "TorchFT is not supported: a run resumes on other ranks instead"),
}
# Beginnings of keys that matter only with other entries of model.converters, which are rejected.
CONVERTERS = ("mx.", "quantize.linear.mx.", "quantize.dense.mx.", "quantize.grouped_mm.",
              "quantize.moe.", "float8.moe_fqns")  # fmt: skip
# month: old name, new name. A table's name with .* stands for all of its keys.
_RENAMES = """
2024-02 global.dump_folder job.dump_folder
2024-03 training.sequence_parallel_degree parallelism.tensor_parallel_degree
2024-03 training.checkpoint_folder checkpoint.folder
2024-03 training.checkpoint_interval checkpoint.interval
2024-03 training.checkpoint_interval_type checkpoint.interval_type
2024-04 profiling.run_profiler profiling.enable_profiling
2024-04 profiling.profile_every_x_iter profiling.profile_freq
2024-05 training.pipeline_parallel_degree parallelism.pipeline_parallel_degree
2024-07 training.enable_fp8_linear float8.enable_float8_linear
2024-07 training.enable_float8_linear float8.enable_float8_linear
2024-07 training.enable_fsdp_fp8_all_gather quantize.linear.float8.enable_fsdp_float8_all_gather
2024-07 training.enable_fsdp_float8_all_gather quantize.linear.float8.enable_fsdp_float8_all_gather
2024-07 training.float8_scaling_type_input float8.scaling_type_input
2024-07 training.float8_scaling_type_weight float8.scaling_type_weight
2024-07 training.float8_scaling_type_grad_output float8.scaling_type_grad_output
2024-09 training.data_parallel_degree parallelism.data_parallel_shard_degree
2025-03 training.data_parallel_replicate_degree parallelism.data_parallel_replicate_degree
2025-03 training.data_parallel_shard_degree parallelism.data_parallel_shard_degree
2025-03 training.tensor_parallel_degree parallelism.tensor_parallel_degree
2025-03 training.disable_loss_parallel parallelism.disable_loss_parallel
2025-03 training.fsdp_reshard_after_forward parallelism.fsdp_reshard_after_forward
2025-03 experimental.context_parallel_degree parallelism.context_parallel_degree
2025-03 experimental.context_parallel_rotate_method parallelism.context_parallel_rotate_method
2025-03 experimental.enable_async_tensor_parallel parallelism.enable_async_tensor_parallel
2025-03 experimental.enable_compiled_autograd parallelism.enable_compiled_autograd
2025-03 experimental.pipeline_parallel_degree parallelism.pipeline_parallel_degree
2025-03 experimental.pipeline_parallel_schedule parallelism.pipeline_parallel_schedule
2025-03 experimental.pipeline_parallel_schedule_csv parallelism.pipeline_parallel_schedule_csv
2025-03 experimental.pipeline_parallel_split_points parallelism.pipeline_parallel_split_points
2025-03 experimental.pipeline_parallel_microbatches parallelism.pipeline_parallel_microbatches
2025-03 experimental.custom_model_path experimental.custom_import
2025-05 training.batch_size training.local_batch_size
2025-06 checkpoint.model_weights_only checkpoint.last_save_model_only
2025-07 checkpoint.last_save_model_weights_only checkpoint.last_save_model_only
2025-07 checkpoint.last_save_in_safetensors_format checkpoint.last_save_in_hf
2025-07 checkpoint.initial_load_model_weights_only checkpoint.initial_load_model_only
2025-07 lr_scheduler.lr_min lr_scheduler.min_lr_factor
2025-08 training.compile compile.enable
2025-08 checkpoint.enable_checkpoint checkpoint.enable
2025-08 validation.enabled validation.enable
2025-08 memory_estimation.enabled memory_estimation.enable
2025-09 float8.recipe_name quantize.linear.float8.recipe_name
2025-09 float8.filter_fqns quantize.linear.float8.filter_fqns
2025-09 float8.emulate quantize.linear.float8.emulate
2025-09 float8.enable_fsdp_float8_all_gather quantize.linear.float8.enable_fsdp_float8_all_gather
2025-10 job.print_args job.print_config
2025-10 training.seed debug.seed
2025-10 training.deterministic debug.deterministic
2025-10 training.debug_moe_force_load_balance debug.moe_force_load_balance
2026-02 experimental.custom_args_module job.custom_config_module
"""
_SCALES = "precompute_float8_dynamic_scale_for_fsdp"
_RENAMES += "".join(
    f"{month} {table}.{name} {FLOAT8}.{name}\n"
    for month, table, names in (
        ("2024-07", "training", (_SCALES,)),
        ("2025-07", "float8", ("force_recompute_fp8_weight_in_bwd",)),
        ("2025-09", "float8", (_SCALES,)),
        ("2025-09", "quantize.dense.float8", (
            "recipe_name", "filter_fqns", "emulate", "enable_fsdp_float8_all_gather", _SCALES,
        )),
    )
    for name in names
)  # fmt: skip
RENAMED: dict[str, tuple[str, str]] = {
    old: (new, month) for month, old, new in map(str.split, _RENAMES.strip().splitlines())
}
"""New name and last month of each old name."""


def keys_table() -> str:
    """Return the table of docs/reference/torchtitan_keys.md."""
    rows = ["| torchtitan | default | here | remark |", "|---|---|---|---|"]
    olds: dict[str, list[str]] = {}
    for old, (new, _) in RENAMED.items():
        olds.setdefault(new, []).append(f"`{old}`")
    for key in KEYS:
        names = [f"`{key.name}`", *olds.get(key.name, [])]
        default = "" if key.default in (None, "", []) else f"`{_toml(key.default)}`"
        ways = {"dropped": "changes nothing here: ", "rejected": "rejected: "}
        to = f"`{key.to}`" if key.to else ""
        # A key with many old names has several rows.
        for start in range(0, len(names), NAMES_IN_A_CELL):
            cells = [
                ", ".join(names[start : start + NAMES_IN_A_CELL]),
                default,
                to,
                ways.get(key.way, "") + key.remark,
            ]
            rows.append(f"| {' | '.join(cells)} |")
    for table, (switch, reason) in FEATURES.items():
        rows.append(f"| `{table}.*` | `{switch} = false` |  | rejected if enabled: {reason} |")
    tables = ", ".join(f"`{table}*`" for table in CONVERTERS)
    rows.append(f"| {tables} |  |  | have no effect without their converter, which is rejected |")
    return "\n".join(rows) + "\n"


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')


if __name__ == "__main__":
    prose = PAGE.read_text().partition(HEADING)[0]
    PAGE.write_text(f"{prose}{HEADING}\n{keys_table()}")
