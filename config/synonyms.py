"""Advice on keys that do not exist: similar names, other sections, and other programs' names."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from config.job_config import JobConfig

# Names in torchtitan, Hugging Face, Megatron-LM, DeepSpeed, nanoGPT and KempnerForge, by our key.
# None is also the name of a key.
_TABLE = """
job.name: job_name run_name exp_name experiment_name wandb_run_name
job.output_dir: out_dir output save save_dir run_dir log_dir dump_folder
model.name: model model_type model_family architecture
model.flavor: size preset model_size model_name_or_path config_name
model.vocab_size: n_vocab padded_vocab_size
model.args.dim: dim hidden_size d_model model_dim n_embd embed_dim embedding_dim
model.args.n_layers: n_layers n_layer num_layers num_hidden_layers layers depth
model.args.n_heads: n_heads n_head num_heads num_attention_heads heads
model.args.n_kv_heads: n_kv_heads n_kv_head kv_heads num_kv_heads num_key_value_heads
model.args.n_kv_heads: num_query_groups
model.args.head_dim: head_dim head_size d_head kv_channels
model.args.hidden_dim: hidden_dim intermediate_size ffn_hidden_size ffn_dim mlp_dim d_ff
model.args.rope_theta: rope_theta rope_base rotary_base
model.args.norm_eps: norm_eps rms_norm_eps norm_epsilon layernorm_epsilon layer_norm_eps
model.args.tie_embeddings: tie_embeddings tie_word_embeddings tied_embeddings
model.args.tie_embeddings: weight_tying enable_weight_tying
model.args.n_experts: n_experts num_experts num_local_experts num_moe_experts n_routed_experts
model.args.top_k: top_k n_chosen num_experts_per_tok num_experts_per_token moe_router_topk
data.source: dataset dataset_type
data.path: data_path data_dir dataset_path dataset_name dataset_dir train_data train_file
data.subset: dataset_config dataset_config_name
data.tokenizer: tokenizer_path tokenizer_name tokenizer_model tokenizer_type hf_assets_path
data.text_key: text_column text_column_name text_field json_keys
data.document_mask: attn_mask_type block_causal reset_attention_mask
data.prefetch: num_workers dataloader_num_workers prefetch_factor
data.validation_percent: split val_split val_ratio validation_split_percentage
training.steps: max_steps max_iters train_iters train_steps num_steps num_iterations iterations
training.steps: max_train_steps num_train_steps total_iters
training.seq_len: max_seq_len block_size context_length context_size max_length max_seq_length n_ctx
training.seq_len: seq_length sequence_length max_position_embeddings
training.local_batch_size: batch_size micro_batch_size mbs device_batch_size
training.local_batch_size: per_device_train_batch_size
training.global_batch_size: gbs total_batch_size train_batch_size grad_accum grad_accum_steps
training.global_batch_size: gradient_accumulation_steps accumulate_grad_batches
training.batch_size_ramp: rampup_batch_size
training.mixed_precision_param: precision mixed_precision bf16 fp16 amp compute_dtype params_dtype
training.mixed_precision_reduce: reduce_dtype grad_reduce_dtype accumulate_allreduce_grads_in_fp32
training.max_norm: grad_clip grad_clip_norm clip_grad clip_grad_norm max_grad_norm
training.max_norm: gradient_clipping gradient_clip_val
optimizer.name: optim optimizer optimizer_name optimizer_type
optimizer.lr: learning_rate max_lr peak_lr
optimizer.beta1: betas adam_beta1
optimizer.beta2: adam_beta2
optimizer.eps: epsilon adam_eps adam_epsilon
optimizer.weight_decay: wd adam_weight_decay
optimizer.muon_momentum: momentum
lr_scheduler.warmup_steps: warmup warmup_iters warmup_ratio lr_warmup_iters lr_warmup_steps
lr_scheduler.warmup_steps: num_warmup_steps
lr_scheduler.decay_ratio: decay_steps cooldown_steps lr_wsd_decay_iters
lr_scheduler.decay_type: scheduler lr_scheduler lr_schedule lr_scheduler_type lr_decay_style
lr_scheduler.decay_type: decay_lr
lr_scheduler.min_lr_factor: lr_min min_lr min_lr_ratio
lr_scheduler.total_steps: lr_decay_iters lr_decay_steps
parallelism.data_parallel: ddp fsdp dp_mode strategy data_parallel_type
parallelism.data_parallel_replicate_degree: hsdp dp_replicate num_replicas
parallelism.data_parallel_shard_degree: dp dp_size dp_degree dp_shard fsdp_size
parallelism.data_parallel_shard_degree: data_parallel_size data_parallel_degree
parallelism.tensor_parallel_degree: tp tp_size tp_degree tensor_parallel tensor_parallel_size
parallelism.tensor_parallel_degree: tensor_model_parallel_size
parallelism.tensor_parallel_async: async_tp enable_async_tensor_parallel tp_comm_overlap
parallelism.context_parallel_degree: cp cp_size cp_degree context_parallel context_parallel_size
parallelism.context_parallel_method: cp_comm_type context_parallel_rotate_method
parallelism.pipeline_parallel_degree: pp pp_size pp_degree pipeline_parallel
parallelism.pipeline_parallel_degree: pipeline_parallel_size pipeline_model_parallel_size
parallelism.pipeline_parallel_schedule: pp_schedule
parallelism.pipeline_parallel_microbatch_size: pp_microbatch_size pipeline_parallel_microbatches
parallelism.pipeline_parallel_stages_per_rank: num_virtual_stages
parallelism.pipeline_parallel_stages_per_rank: virtual_pipeline_model_parallel_size
parallelism.expert_parallel_degree: ep ep_size ep_degree expert_parallel expert_parallel_size
parallelism.expert_parallel_degree: expert_model_parallel_size
parallelism.fsdp_reshard_after_forward: reshard_after_forward sharding_strategy zero_stage
parallelism.fsdp_cpu_offload: cpu_offload enable_cpu_offload
activation_checkpoint.mode: ac ac_mode remat recompute recompute_granularity
activation_checkpoint.mode: activation_checkpointing gradient_checkpointing
activation_checkpoint.selective: selective_ac_option
compile.enable: compile torch_compile use_compile compile_model
float8.recipe: fp8 fp8_recipe enable_fp8 recipe_name converters
float8.skip: filter_fqns
checkpoint.enable: enable_checkpoint
checkpoint.interval: save_every save_interval save_steps ckpt_interval checkpoint_interval
checkpoint.keep_latest_k: keep_last keep_last_n save_total_limit
checkpoint.async_mode: async_save async_checkpoint
checkpoint.initial_load_path: load load_path pretrained_checkpoint
experts.balance_loss: aux_loss aux_loss_weight moe_aux_loss_coeff router_aux_loss_coef
experts.balance_bias_rate: load_balance_coeff moe_router_bias_update_rate
validation.freq: eval_every eval_freq eval_interval eval_steps val_interval
validation.steps: eval_iters val_steps
metrics.log_freq: log_every log_interval logging_steps log_every_n_steps
metrics.trackers: enable_tensorboard tensorboard tensorboard_dir report_to
metrics.trackers: wandb_log use_wandb enable_wandb
metrics.project: wandb_project
profiling.enable_trace: profile profiler enable_profiling run_profiler
profiling.trace_freq: profile_freq
comm.train_timeout_seconds: timeout ddp_timeout distributed_timeout_minutes
debug.seed: random_seed
debug.deterministic: deterministic_mode full_determinism use_deterministic_algorithms
"""
SYNONYMS: dict[str, str] = {
    name: key
    for key, names in (line.split(": ") for line in _TABLE.strip().splitlines())
    for name in names.split()
}
# What other programs have a key for, and no key here stands for.
_INSTEAD = """
there is no dropout: dropout attn_dropout attention_dropout hidden_dropout resid_dropout
to keep the best, see docs/howto/validation.md: always_save_checkpoint load_best_model_at_end
a run has training.steps, and ./shardloom plan says how many epochs: epochs n_epochs num_epochs
a run has training.steps, and ./shardloom plan says how many epochs: max_epochs num_train_epochs
checkpoint.initial_load_path takes weights; a run started again resumes: init_from resume_from
checkpoint.initial_load_path takes weights; a run started again resumes: resume auto_resume
checkpoint.initial_load_path takes weights; a run started again resumes: resume_from_checkpoint
"""
ABSENT: dict[str, str] = {
    name: text
    for text, names in (line.split(": ") for line in _INSTEAD.strip().splitlines())
    for name in names.split()
}
# Of a table that does not exist.
MOST_KEYS = 8


def advice(key: str) -> str:
    """Return ``"; did you mean KEY?"`` for a ``key`` that does not exist; "" if none is similar.

    ``key`` is ``section.name``, ``section.name[0].key``, or a name without its section. What has no
    key here is said to have none.
    """
    if text := ABSENT.get(_normal(key.rpartition(".")[2])):
        return f"; {text}"
    candidates = _similar(key)
    return f"; did you mean {' or '.join(candidates)}?" if candidates else ""


def table_advice(section: str, names: Iterable[str]) -> str:
    """Return advice on a table that does not exist, and on the ``names`` of the keys in it."""
    near = difflib.get_close_matches(section, JobConfig.model_fields, n=1)
    others = [name for name in names if not near or name not in _names(near[0])]
    known = [f"{name} is {key}" for name in others for key in _elsewhere(name)[:1]]
    known += [f"{name}: {ABSENT[_normal(name)]}" for name in others if _normal(name) in ABSENT]
    keys = "".join(f"; {section}.{text}" for text in known[:MOST_KEYS])
    return keys + (f"; did you mean [{near[0]}]?" if near else "")


def argument_advice(name: str) -> str:
    """Return advice on an entry of ``[model.args]`` that has another program's name, else ""."""
    if text := ABSENT.get(_normal(name)):
        return f"; {text}"
    table, _, argument = SYNONYMS.get(_normal(name), "").rpartition(".")
    return f"; did you mean {argument}?" if table == "model.args" and argument != name else ""


def _similar(key: str) -> list[str]:
    """Keys that a user who wrote ``key`` may mean."""
    section, _, name = key.rpartition(".")
    if "[" in section:
        return difflib.get_close_matches(name, _item_names(*section.split("[")[0].split(".")), n=1)
    near = difflib.get_close_matches(name, _names(section), n=1)
    return _elsewhere(name) or [f"{section}.{other}" for other in near]


def _elsewhere(name: str) -> list[str]:
    """Keys of this name in any section, else the key of which it is a synonym."""
    owners = [section for section in JobConfig.model_fields if name in _names(section)]
    if owners:
        return [f"{owner}.{name}" for owner in owners]
    return [SYNONYMS[_normal(name)]] if _normal(name) in SYNONYMS else []


def _normal(name: str) -> str:
    return name.lower().replace("-", "_")


def _names(section: str) -> Mapping[str, Any]:
    """Fields of a section; none if there is no such section."""
    if section not in JobConfig.model_fields:
        return {}
    return type(JobConfig.model_fields[section].default).model_fields


def _item_names(section: str, array: str) -> list[str]:
    """Names of the keys in each table of an array of tables."""
    items = get_args(_names(section)[array].annotation)
    return [name for item in items for name in item.model_fields]
