"""Configs that are rejected, and every key of the config."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from config import JobConfig


@dataclass(frozen=True)
class Bad:
    key: str
    """Key that each line on stderr must name."""
    typed: str = ""
    """Command-line overrides."""
    toml: str = ""
    says: str = ""
    """Part of the reason."""
    ranks: int = 2

    def __str__(self) -> str:
        return self.typed or self.toml.replace("\n", " ")

    @property
    def overrides(self) -> list[str]:
        return shlex.split(self.typed)


TP = "parallelism.tensor_parallel_degree"
CP, PP = TP.replace("tensor", "context"), TP.replace("tensor", "pipeline")
EP = "parallelism.expert_parallel_degree"
MOE, NEXT = "--model.name qwen3_moe", "--model.name qwen3_next"
GATHER = "--parallelism.context_parallel_method allgather"
SCHEDULE = "--parallelism.pipeline_parallel_schedule"
HSDP = "--parallelism.data_parallel_replicate_degree"
SHARD = "--parallelism.data_parallel_shard_degree"
DDP, SIMPLE = "--parallelism.data_parallel ddp", "--parallelism.data_parallel simple_fsdp"
RESHARD = "--parallelism.fsdp_reshard_after_forward"
FLOAT8 = "--float8.recipe tensorwise"
EMULATED = f"{FLOAT8} --float8.emulate true"
BUDGET = "--activation_checkpoint.mode memory_budget"
ELASTIC = "--debug.deterministic elastic"
RAMP = (
    "--training.global_batch_size 64 --training.batch_size_ramp"
    " '[{{steps = 1, global_batch_size = {}}}]'"
)
FILE = "run.toml"
OWN = """
[[validation.sources]]
name = "own"
"""
SOURCES = """
[[data.sources]]
type = "files"
path = "*.txt"
"""

BAD = [
    # Validation sources
    Bad("validation.sources", "--validation.enable false", toml=f"{OWN}path = 'a.txt'",
        says="without validation.enable"),
    Bad("validation.sources[0].name", toml="[[validation.sources]]\npath = 'a'", says="required"),
    Bad("validation.sources[0].weight", toml=f"{OWN}weight = 1.0", says="unknown key"),
    Bad("validation.sources", toml=OWN, says="path must be set"),
    Bad("validation.sources", toml=f"{OWN}path = 'a'\n{OWN}path = 'b'", says="each its own (own)"),
    Bad("validation.sources", toml=f"{OWN}path = 'a'\n{OWN.replace('own', 'two')}path = 'a'",
        says="same documents (two)"),
    Bad("validation.sources", toml=f"{OWN}type = 'c4'\npath = 'a'", says="path has no effect"),
    Bad("validation.sources", toml=f"{OWN}path = 'a'\nsubset = 'en'", says="subset"),
    Bad("validation.sources", toml=f"{OWN}path = 'a'\nrevision = 'v1'", says="revision"),
    Bad("validation.sources", toml=f"{OWN}type = 'text'\npath = 'a'\ntext_key = 'x'",
        says="text_key"),
    Bad("validation.sources", toml=f"{OWN}path = 'a'\nargs = {{x = 1}}", says="args"),
    Bad("validation.sources", toml=f"{OWN}path = 'a'\nsplit = 'test'", says="split"),
    Bad("validation.sources", toml=f"{OWN}type = 'c4'\nexclude_from_training = true",
        says="exclude_from_training"),
    Bad("validation.sample_prompts",
        "--validation.sample_prompts '[\"a\"]' --validation.sample_prompt b", says="no effect"),
    Bad("validation.steps", "--validation.steps every", says="'all'"),
    # Wrong types
    Bad("training.steps", "--training.steps ten", says="integer"),
    Bad("training.steps", "--training.steps 10.5", says="10.5"),
    Bad("training.steps", "--training.steps 1e3", says="integer"),
    Bad("training.steps", "--training.steps True", says="integer"),
    Bad("training.steps", "--training.steps ''", says="integer"),
    Bad("training.steps", toml="[training]\nsteps = true", says="integer"),
    Bad("training.steps", toml="[training]\nsteps = '10'", says="'10'"),
    Bad("training.steps", toml="[training]\nsteps = 2024-01-01", says="integer"),
    Bad("compile.enable", toml='[compile]\nenable = "true"', says="'true'"),
    Bad("compile.enable", "--compile.enable True", says="'True'"),
    Bad("compile.enable", "--compile.enable 1", says="boolean"),
    Bad("optimizer.lr", "--optimizer.lr fast", says="'fast'"),
    Bad("job.name", toml="[job]\nname = 2024", says="string"),
    Bad("metrics.peak_tflops", "--metrics.peak_tflops H100", says="'H100'"),
    Bad("activation_checkpoint.selective", "--activation_checkpoint.selective ops", says="'ops'"),
    Bad("compile.backend", "--compile.backend aot_eager", says="compile.enable"),
    Bad("compile.backend", "--compile.enable true --compile.backend aot_eagr", says="aot_eagr"),
    # Out of range
    Bad("optimizer.lr", "--optimizer.lr nan", says="finite"),
    Bad("optimizer.lr", "--optimizer.lr inf", says="finite"),
    Bad("optimizer.lr", "--optimizer.lr 0"),
    Bad("optimizer.lr", "--optimizer.lr=-3e-4", says="-0.0003"),
    Bad("optimizer.beta2", "--optimizer.beta2 1.0", says="less than 1"),
    Bad("training.steps", "--training.steps 0", says="got 0"),
    Bad("training.steps", "--training.steps -1", says="got -1"),
    Bad("training.max_norm", "--training.max_norm 0"),
    Bad("lr_scheduler.decay_ratio", "--lr_scheduler.decay_ratio 1.5", says="got 1.5"),
    Bad("data.validation_percent", "--data.validation_percent 51", says="got 51"),
    Bad("debug.seed", f"--debug.seed {2**63}", says="less than"),
    Bad("parallelism.data_parallel_shard_degree", "--parallelism.data_parallel_shard_degree 0"),
    # Not one of the choices
    Bad("training.dtype", "--training.dtype float16", says="'bfloat16'"),
    Bad("activation_checkpoint.mode", "--activation_checkpoint.mode on", says="'selective'"),
    Bad("data.source", "--data.source c5", says="'c4'"),
    Bad("model.name", "--model.name lama3", says="did you mean 'llama3'?"),
    Bad("model.flavor", "--model.flavor debugmodle", says="did you mean 'debugmodel'?"),
    # Names that would escape the run's folder, or confuse a shell
    Bad("job.name", "--job.name ''"),
    Bad("job.name", "--job.name a/b"),
    Bad("job.name", "--job.name ../x"),
    Bad("job.name", "--job.name .."),
    Bad("job.name", "--job.name 'a;touch x'"),
    Bad("job.name", "--job.name=--x"),
    Bad("job.name", "--job.name 'a\n'"),
    Bad("job.name", "--job.name " + 65 * "x"),
    Bad("job.output_dir", "--job.output_dir=", says="at least 1"),
    Bad("job.output_dir", "--job.output_dir s3://bucket/runs", says="not a URL"),
    Bad("data.tokenizer", "--data.tokenizer=", says="at least 1"),
    # No such key, table or spelling
    Bad("training.step", "--training.step 1", says="did you mean training.steps?"),
    Bad("training.lr", toml="[training]\nlr = 1", says="did you mean optimizer.lr?"),
    Bad("traning", "--traning.steps 1", says="did you mean [training]?"),
    Bad("traning", toml="[traning]\nsteps = 1", says="did you mean [training]?"),
    Bad("job.name", toml="[job.name]\nx = 1", says="string"),
    Bad("steps", toml="steps = 1", says="must be in a [table]"),
    Bad("job", toml="[[job]]\nname = 'x'", says="must be in a [table]"),
    Bad("'--steps'", "--steps 1", says="not --section.key"),
    Bad("'-training.steps'", "-training.steps=1", says="not --section.key"),
    Bad("'--a.b.c'", "--a.b.c 1", says="not --section.key"),
    Bad("'--training.'", "--training. 1", says="not --section.key"),
    Bad("'extra'", "--training.steps 1 extra", says="not --section.key"),
    Bad("--training.steps", "--training.steps", says="needs a value"),
    Bad("--training.steps", "--training.steps --compile.enable=true", says="needs a value"),
    Bad(FILE, toml="[training\nsteps = 1", says="line 1"),
    Bad(FILE, toml="[training]\nsteps = 1\nsteps = 2"),
    # Contradictions
    Bad(TP, f"--{TP} 2", says="= 2 does not divide 3 ranks; NGPU=2 or 4 would", ranks=3),
    Bad(TP, f"--{TP} 4", says="= 4 does not divide 2 ranks; NGPU=4 would"),
    Bad("parallelism.data_parallel_shard_degree", f"{SHARD} 2 {HSDP} 2",
        says="= 2 * 2 = 4 is not the number of ranks, 2; NGPU=4 or"
        " data_parallel_shard_degree = 1 (or -1) would"),
    Bad(TP, f"--{TP} 0", says="greater than or equal to 1, got 0"),
    Bad(TP, f"--{TP} -2", says="greater than or equal to 1, got -2"),
    Bad("parallelism.data_parallel_shard_degree", f"{SHARD} -2", says="got -2"),
    Bad("parallelism.data_parallel_shard_degree",
        f"{DDP} --parallelism.data_parallel_shard_degree 2", says="does not shard"),
    Bad("parallelism.data_parallel_replicate_degree", f"{DDP} {HSDP} 2", says="number of", ranks=4),
    Bad("parallelism.fsdp_reshard_after_forward", f"{DDP} {RESHARD} never", says="ddp"),
    Bad("parallelism.fsdp_reshard_after_forward", f"{SIMPLE} {RESHARD} always", says="default"),
    Bad("parallelism.fsdp_reshard_after_forward", f"{SIMPLE} {RESHARD} 2", says="never", ranks=4),
    Bad("parallelism.fsdp_reshard_after_forward", f"{SIMPLE} {RESHARD} never", says="recomputes"),
    Bad("parallelism.fsdp_reshard_after_forward", f"{RESHARD} 2", says="divide"),
    Bad("parallelism.fsdp_reshard_after_forward", f"{RESHARD} 3", says="divide", ranks=4),
    Bad("parallelism.fsdp_reshard_after_forward", f"{RESHARD} 2 --{TP} 2", says="tensor", ranks=8),
    Bad("parallelism.fsdp_reshard_after_forward", f"{RESHARD} 0", says="got 0"),
    Bad("parallelism.fsdp_reshard_after_forward", f"{RESHARD} sometimes", says="'never'"),
    Bad("parallelism.fsdp_reduce_gradients",
        f"{SIMPLE} --parallelism.fsdp_reduce_gradients last_microbatch", says="fsdp2"),
    Bad("parallelism.fsdp_reduce_gradients",
        "--parallelism.fsdp_reduce_gradients last_microbatch", says="one microbatch"),
    Bad("parallelism.fsdp_backward_prefetch",
        f"{RESHARD} never --parallelism.fsdp_backward_prefetch 1", says="never"),
    Bad("parallelism.fsdp_forward_prefetch", f"{DDP} --parallelism.fsdp_forward_prefetch 1"),
    Bad("parallelism.fsdp_backward_prefetch", f"{DDP} --parallelism.fsdp_backward_prefetch 1"),
    Bad("parallelism.fsdp_cpu_offload", f"{SIMPLE} --parallelism.fsdp_cpu_offload true"),
    Bad("parallelism.data_parallel", "--parallelism.data_parallel fsdp", says="'fsdp2'"),
    Bad("optimizer.name", "--optimizer.name lion", says="'muon' or module:attribute, got 'lion'"),
    Bad("optimizer.name", f"--optimizer.name my_optim:Lion {ELASTIC}", says="elastic"),
    Bad("optimizer.args", "--optimizer.args.beta 0.5", says="module:attribute"),
    Bad("optimizer.beta1", "--optimizer.name my_optim:Lion --optimizer.beta1 0.5", says="effect"),
    Bad("optimizer.beta2", "--optimizer.name my_optim:Lion --optimizer.beta2 0.5", says="effect"),
    Bad("optimizer.eps", "--optimizer.name my_optim:Lion --optimizer.eps 0.5", says="effect"),
    Bad("optimizer.state_dtype",
        "--optimizer.name my_optim:Lion --optimizer.state_dtype bfloat16", says="effect"),
    Bad("lr_scheduler.decay_type", "--lr_scheduler.decay_type exp", says="or module:attribute"),
    Bad("lr_scheduler.args", "--lr_scheduler.args.floor .5", says="module:attribute"),
    Bad("data.args", "--data.args.count 5", says="module:attribute"),
    Bad("data.source", "--data.source my_data.Source", says="or module:attribute"),
    Bad("optimizer.name", f"--optimizer.name muon {ELASTIC}", says="elastic"),
    Bad("parallelism.fsdp_cpu_offload",
        "--optimizer.name muon --parallelism.fsdp_cpu_offload true", says="host"),
    Bad("optimizer.muon_momentum", "--optimizer.muon_momentum 0.9", says="optimizer.name"),
    Bad("optimizer.muon_momentum",
        "--optimizer.name muon --optimizer.state_dtype bfloat16 --optimizer.muon_momentum 0.999",
        says="0.99609375"),
    Bad("optimizer.state_dtype", "--training.dtype bfloat16 --optimizer.state_dtype bfloat16",
        says="float32"),
    Bad("optimizer.param_remainders", "--optimizer.param_remainders false", says="bfloat16"),
    Bad("optimizer.param_remainders",
        "--optimizer.name my_optim:Lion --optimizer.param_remainders false", says="effect"),
    Bad("optimizer.beta2", "--training.dtype bfloat16 --optimizer.beta2 0.999", says="0.99609375"),
    Bad("optimizer.beta1", "--optimizer.state_dtype bfloat16 --optimizer.beta1 0.997",
        says="0.99609375"),
    Bad("optimizer.beta2", "--optimizer.state_dtype bfloat16 --optimizer.beta2 0.999",
        says="0.99609375"),
    Bad("parallelism.expert_parallel_degree", "--parallelism.expert_parallel_degree 2"),
    Bad(TP, f"--{TP} 3 --model.flavor 8B --training.seq_len 96", says="n_heads", ranks=3),
    Bad(TP, f"--{TP} 3 --model.flavor 8B --training.seq_len 96", says="n_kv_heads", ranks=3),
    Bad(TP, f"--{TP} 5 --training.seq_len 100", says="hidden_dim", ranks=5),
    Bad(TP, f"--{TP} 2 --model.vocab_size 321", says="model.vocab_size"),
    Bad("training.seq_len", f"--{TP} 2 --training.seq_len 255", says="multiple of tensor"),
    Bad("training.seq_len", f"--{CP} 2 --training.seq_len 255", says="context_parallel_degree"),
    Bad("training.seq_len", f"--{CP} 2 {GATHER} --training.seq_len 254", says="twice"),
    Bad(f"{TP[:-6]}async", f"--{TP[:-6]}async true --compile.enable true", says="no effect"),
    Bad(f"{TP[:-6]}async", f"--{TP[:-6]}async true --compile.enable true --{TP} 2", says="GPU"),
    Bad(f"{TP[:-6]}async", f"--{TP[:-6]}async true --{TP} 2", says="compile.enable"),
    Bad(f"{TP[:-6]}async",
        f"--{TP[:-6]}async true --compile.enable true --{TP} 2 --training.local_batch_size 1",
        says="several sequences"),
    Bad("parallelism.context_parallel_method", GATHER, says="has no effect"),
    Bad("parallelism.context_parallel_method", f"--{CP} 8", says="n_heads", ranks=8),
    Bad(PP, f"--{PP} 8", says="layers", ranks=8),
    Bad(PP, f"--{PP} 4 {SCHEDULE} Interleaved1F1B", says="layers", ranks=4),
    Bad("parallelism.pipeline_parallel_schedule", f"{SCHEDULE} GPipe", says="no effect"),
    Bad("parallelism.pipeline_parallel_schedule",
        f"--{PP[:-6]}microbatch_size 2", says="no effect"),
    Bad("parallelism.pipeline_parallel_stages_per_rank",
        f"--{PP} 2 --{PP[:-6]}stages_per_rank 3", says="interleaved"),
    Bad("parallelism.pipeline_parallel_microbatch_size",
        f"--{PP} 2 --{PP[:-6]}microbatch_size 3", says="local_batch_size"),
    Bad("training.global_batch_size",
        f"--{PP} 2 --{PP[:-6]}microbatch_size 8", says="as many microbatches"),
    Bad("training.global_batch_size",
        f"--{PP} 2 {SCHEDULE} Interleaved1F1B --training.local_batch_size 5", says="multiple of"),
    Bad("parallelism.fsdp_reshard_after_forward", f"--{PP} 2 {SIMPLE} {RESHARD} never"
        " --activation_checkpoint.mode none", says="each microbatch"),
    Bad("parallelism.fsdp_forward_prefetch", f"--{PP} 2 {SCHEDULE} Interleaved1F1B"
        " --parallelism.fsdp_forward_prefetch 1", says="whole stages"),
    Bad("parallelism.fsdp_backward_prefetch",
        f"--{PP} 2 --parallelism.fsdp_backward_prefetch 2", says="pipeline"),
    Bad("metrics.straggler_window", f"--{CP} 2 --metrics.straggler_window 10", says="wait"),
    Bad("parallelism.pipeline_parallel_schedule",
        f"--{PP} 2 {SCHEDULE} InterleavedZeroBubble --activation_checkpoint.mode none"
        f" {RESHARD} always", says="freed"),
    Bad(TP, f"{NEXT} --{TP} 4", says="n_key_heads", ranks=4),
    Bad("parallelism.context_parallel_", f"{NEXT} --{CP} 8", says="n_key_heads", ranks=8),
    Bad("experts.balance_loss", "--experts.balance_loss 0.5", says="no MoE layers"),
    Bad("experts.balance_bias_rate", "--experts.balance_bias_rate 0.5", says="no MoE layers"),
    Bad("debug.deterministic", f"{MOE} {ELASTIC}", says="dense"),
    Bad("parallelism.expert_parallel_degree", f"{MOE} --{EP} 3",
        says="(3 does not divide 8)", ranks=3),
    Bad("parallelism.expert_parallel_degree", f"{MOE} --{EP} 4",
        says="(4 does not divide 2; 1 or 2 would)"),
    Bad("parallelism.data_parallel", f"{MOE} --{EP} 2 {SIMPLE}", says="fsdp2"),
    Bad("parallelism.fsdp_reshard_after_forward", f"{MOE} --{EP} 2 {RESHARD} 2",
        says="expert parallel", ranks=4),
    Bad("compile.cuda_graphs", "--compile.cuda_graphs always", says="no GPU"),
    Bad("metrics.straggler_window", f"{MOE} --{EP} 2 --metrics.straggler_window 9", says="tokens"),
    Bad("metrics.straggler_window", f"{MOE} --{TP} 2 --metrics.straggler_window 9", says="experts",
        ranks=4),
    Bad("parallelism.pipeline_parallel_schedule",
        f"--{PP} 2 {SCHEDULE} InterleavedZeroBubble", says="recompute twice"),
    Bad("parallelism.pipeline_parallel_schedule",
        f"--{PP} 2 {SCHEDULE} InterleavedZeroBubble --compile.enable true", says="compiled"),
    Bad("training.global_batch_size", "--training.global_batch_size 24",
        says="(24 is not a multiple of 8 * 2)"),
    Bad("training.global_batch_size", "--training.global_batch_size 4", says="multiple"),
    Bad("training.batch_size_ramp", RAMP.format(24), says="(24 is not a multiple of 8 * 2)"),
    Bad("training.batch_size_ramp", RAMP.format(64), says="must grow"),
    Bad("training.batch_size_ramp", RAMP.format(80), says="must grow"),
    Bad("training.batch_size_ramp", "--training.batch_size_ramp"
        " '[{steps = 1, global_batch_size = 16}]'", says="must grow"),
    Bad("training.batch_size_ramp", "--training.global_batch_size 64 --training.batch_size_ramp"
        " '[{steps = 1, global_batch_size = 32}, {steps = 1, global_batch_size = 16}]'",
        says="must grow"),
    Bad("training.batch_size_ramp", f"{RAMP.format(48)} {ELASTIC}", says="2^n microbatches"),
    Bad("training.batch_size_ramp", f"{RAMP.format(8)} --{PP} 2 --{PP[:-6]}microbatch_size 8",
        says="as many microbatches"),
    Bad("training.batch_size_ramp", f"{RAMP.format(5)} --{PP} 2 {SCHEDULE} Interleaved1F1B"
        " --training.local_batch_size 5 --training.global_batch_size 70", says="multiple of pipel"),
    Bad("training.batch_size_ramp[0].global_batch_size", RAMP.format(0), says="got 0"),
    Bad("training.batch_size_ramp[0].global_batch_size",
        toml="[[training.batch_size_ramp]]\nsteps = 1", says="required"),
    Bad("training.batch_size_ramp[0].step",
        toml="[[training.batch_size_ramp]]\nsteps = 1\nglobal_batch_size = 8\nstep = 1",
        says="did you mean steps?"),
    Bad("training.batch_size_ramp", "--training.batch_size_ramp 16", says="list"),
    Bad("parallelism.data_parallel", f"{ELASTIC} {DDP}", says="fsdp2"),
    Bad("parallelism.data_parallel", f"{ELASTIC} {SIMPLE}", says="fsdp2"),
    Bad("parallelism.data_parallel_replicate_degree", f"{ELASTIC} {HSDP} 2", says="replicas"),
    Bad("parallelism.data_parallel_shard_degree", ELASTIC, says="power of two", ranks=3),
    Bad("training.global_batch_size",
        f"{ELASTIC} --training.global_batch_size 48", says="2^n microbatches"),
    Bad("parallelism.fsdp_reduce_gradients",
        f"{ELASTIC} --training.global_batch_size 32"
        " --parallelism.fsdp_reduce_gradients last_microbatch", says="pairwise"),
    Bad("parallelism.context_parallel_degree",
        f"{ELASTIC} --parallelism.context_parallel_degree 2", says="only data and tensor"),
    Bad("parallelism.pipeline_parallel_degree",
        f"{ELASTIC} --parallelism.pipeline_parallel_degree 2", says="only data and tensor"),
    Bad("parallelism.expert_parallel_degree",
        f"{ELASTIC} --parallelism.expert_parallel_degree 2", says="only data and tensor"),
    Bad("training.mixed_precision_param",
        "--training.dtype float64 --training.mixed_precision_param bfloat16", says="float32"),
    Bad("training.mixed_precision_reduce",
        "--training.dtype bfloat16 --training.mixed_precision_reduce bfloat16", says="float32"),
    Bad("training.local_batch_size", "--training.local_batch_size auto",
        says="requires training.global_batch_size"),
    Bad("training.local_batch_size", f"--training.local_batch_size auto --{PP} 2"
        " --training.global_batch_size 64", says="not supported with pipelines"),
    Bad("activation_checkpoint.selective",
        toml="[activation_checkpoint]\nmode = 'auto'\nselective = 2", says="no effect"),
    Bad("activation_checkpoint.selective",
        toml="[activation_checkpoint]\nmode = 'full'\nselective = 2", says="no effect"),
    Bad("activation_checkpoint.selective",
        toml="[activation_checkpoint]\nmode = 'none'\nselective = 2", says="no effect"),
    Bad("parallelism.fsdp_cpu_offload", "--parallelism.fsdp_cpu_offload true", says="GPU"),
    Bad("float8.recipe", "--float8.recipe delayed", says="'rowwise'"),
    Bad("float8.recipe", "--float8.emulate true", says="no effect"),
    Bad("float8.recipe", "--float8.skip_small false", says="no effect"),
    Bad("float8.recipe", FLOAT8, says="8.9"),
    Bad("float8.recipe", f"{FLOAT8} --training.dtype float64", says="only with float8.emulate"),
    Bad("float8.recipe", f"{FLOAT8} --training.mixed_precision_param float32",
        says="only with float8.emulate"),
    Bad("parallelism.pipeline_parallel_schedule", f"{EMULATED} --{PP} 2 {SCHEDULE}"
        " InterleavedZeroBubble --activation_checkpoint.mode none", says="float8"),
    Bad("debug.deterministic", f"{EMULATED} {ELASTIC}", says="float8"),
    Bad("training.seq_len", f"{EMULATED} --training.seq_len 100 --training.local_batch_size 1",
        says="16"),
    Bad("activation_checkpoint.memory_budget", "--activation_checkpoint.memory_budget 0.3",
        says="no effect"),
    Bad("activation_checkpoint.memory_budget", f"{BUDGET} --activation_checkpoint.memory_budget 2"),
    Bad("activation_checkpoint.mode", BUDGET, says="compile.enable"),
    Bad("activation_checkpoint.mode",
        f"{BUDGET} --compile.enable true --compile.backend aot_eager", says="compile.backend"),
    Bad(TP, f"{BUDGET} --compile.enable true --{TP} 2", says="memory_budget"),
    Bad("parallelism.context_parallel_method", f"{BUDGET} {GATHER} --{CP} 2 --compile.enable true "
        "--compile.backend aot_eager_decomp_partition", says="memory_budget"),
    Bad("activation_checkpoint.mode", f"{BUDGET} {SIMPLE} --compile.enable true", says="gathered"),
    Bad(
        "activation_checkpoint.mode",
        "--compile.enable true --activation_checkpoint.mode full " + SIMPLE,
        says="compile",
    ),
    Bad(
        "activation_checkpoint.mode",
        f"--compile.enable true --activation_checkpoint.selective 2 --{TP} 2",
        says="compile",
    ),
    Bad("profiling.enable_memory_snapshot", "--profiling.enable_memory_snapshot true", says="CUDA"),
    Bad("profiling.trace_freq", "--profiling.trace_freq 50", says="no effect unless"),
    Bad("profiling.trace_freq", "--profiling.enable_trace true --training.steps 99",
        says="nothing is traced"),
    Bad("lr_scheduler.total_steps", "--lr_scheduler.total_steps 99", says="training.steps"),
    Bad("numerics.max_skipped", "--numerics.max_skipped 5", says="on_nonfinite"),
    Bad("numerics.spike_sigmas", "--numerics.spike_sigmas 4", says="on_spike"),
    Bad("numerics.spike_sigmas", "--numerics.spike_window 50", says="on_spike"),
    Bad("numerics.spike_sigmas", "--numerics.max_rollbacks 7", says="on_spike"),
    Bad("metrics.straggler_window", "--metrics.straggler_window 5 " + SIMPLE, says="simple_fsdp"),
    Bad("metrics.straggler_window", "--metrics.straggler_window 5", ranks=1, says="more than one"),
    Bad("checkpoint.keep_every", "--checkpoint.keep_every 750", says="multiple"),
    Bad("checkpoint.max_unsaved_steps", "--checkpoint.max_unsaved_steps 499", says="at least"),
    Bad("checkpoint.max_unsaved_steps",
        "--checkpoint.max_unsaved_steps 999 --checkpoint.async_mode async", says="twice"),
    Bad("checkpoint.keep_every",
        "--checkpoint.keep_every 1000 --checkpoint.keep_latest_k 0", says="all are kept"),
    Bad("numerics.on_spike", "--numerics.on_spike rollback --checkpoint.enable false",
        says="requires checkpoint.enable"),
    Bad("data.path", "--data.source files", says="must be set"),
    Bad("data.path", "--data.source huggingface", says="must be set"),
    Bad("data.path", "--data.source tokens", says="must be set"),
    Bad("data.path", "--data.path *.txt", says="no effect"),
    Bad("data.path", "--data.source c4 --data.path en", says="no effect"),
    Bad("data.subset", "--data.source c4 --data.subset en", says="no effect"),
    Bad("data.revision", "--data.revision main", says="no effect"),
    Bad("data.sources", "--data.text_key a", toml=SOURCES, says="when it is set"),
    Bad("data.sources", "--data.source c4", toml=SOURCES, says="when it is set"),
    Bad("data.sources", "--data.path x", toml=SOURCES, says="when it is set"),
    Bad("data.sources", "--data.revision main", toml=SOURCES, says="when it is set"),
    Bad("data.max_bad_records", "--data.max_bad_records 5", says="on_bad_record"),
    Bad("metrics.trackers", "--metrics.trackers '[\"wandb\", \"wandb\"]'", says="twice"),
    Bad("metrics.trackers", "--metrics.trackers '[\"wandbb\"]'", says="wandb"),
    Bad("metrics.project", "--metrics.project books", says="no effect unless"),
    Bad("data.sources", toml=SOURCES + SOURCES, says="same name: give each its own (*.txt)"),
    *(
        Bad("data.sources", toml=f"{SOURCES}[[data.sources]]\nname = 'own'\n{keys}", says=says)
        for keys, says in (
            ("", "path must be set for the types files, text, tokens and huggingface (own)"),
            ("type = 'c4'\npath = 'a'", "path has no effect for the types builtin and c4 (own)"),
            ("path = 'a'\nsubset = 'en'", "huggingface (own)"),
            ("path = 'a'\nrevision = 'v1'", "c4 or huggingface (own)"),
            ("type = 'text'\npath = 'a'\ntext_key = 'x'", "files or huggingface (own)"),
            ("path = 'a'\nargs = {x = 1}", "module:attribute (own)"),
        )
    ),
    Bad("data.sources[0].weight", toml=SOURCES + "weight = 0.0", says="greater than 0"),
    Bad("data.sources[0].wait", toml=SOURCES + "wait = 1.0", says="weight"),
    Bad("data.sources", toml="[data]\nsources = 3", says="list"),
    Bad("data.text_key", "--data.text_key content", says="no effect"),
    Bad("data.text_key", "--data.source c4 --data.text_key content", says="no effect"),
    Bad("data.text_key", "--data.source tokens --data.path x --data.text_key y", says="no effect"),
    Bad("data.validation_percent", "--data.validation_percent 0", says="greater than 0"),
    Bad("data.validation_percent", "--data.source files --data.path x --data.validation_percent 0",
        says="greater than 0"),
]  # fmt: skip


def write(folder: Path, toml: str) -> Path:
    path = folder / FILE
    path.write_text(toml)
    return path


def all_keys() -> list[str]:
    return [
        f"{section}.{name}"
        for section, field in JobConfig.model_fields.items()
        for name in type(field.default).model_fields
    ]
