"""All TOML tables and keys of a run, with types, ranges and defaults.

Sections are frozen and strict: pydantic rejects unknown keys and coerces nothing, but the names of
choices may be in any case. The docstring under a field is its help text (``./run_train.sh --help``)
and its description in ``config/schema.json``.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
# PyTorch counts nanoseconds in 64 bits.
Seconds = Annotated[int, Field(ge=1, le=10**8)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Dtype = Literal["float64", "float32", "bfloat16"]
# Other names of choices.
ABBREVIATIONS = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16"}
# Marks keys that name files. The loader expands ~ and variables in them, see config/paths.py.
PATH = "path"
PathText = Annotated[str, PATH]
# module:attribute, code outside of this repository.
OUTSIDE_PATTERN = r"^[\w.]+:[\w.]+$"
Outside = Annotated[str, Field(pattern=OUTSIDE_PATTERN)]


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    @model_validator(mode="before")
    @classmethod
    def _read_choices_in_any_case(cls, table: Any) -> Any:
        """Replace the names of choices, such as AdamW and BF16, by their canonical forms."""
        if not isinstance(table, dict):
            return table
        choices = _choices_of(cls)
        return {key: _canonical(value, choices.get(key, {})) for key, value in table.items()}


def _canonical(value: Any, choices: dict[str, str]) -> Any:
    if isinstance(value, list):
        return [_canonical(each, choices) for each in value]
    return choices.get(value.lower(), value) if isinstance(value, str) else value


@cache
def _choices_of(section: type[BaseModel]) -> dict[str, dict[str, str]]:
    """Canonical form of each choice and abbreviation, in lower case, by key."""
    found = {}
    for key, field in section.model_fields.items():
        names = [name for name in literals(field.annotation) if isinstance(name, str)]
        abbreviated = {short: name for short, name in ABBREVIATIONS.items() if name in names}
        found[key] = {**abbreviated, **{name.lower(): name for name in names}}
    return found


def literals(annotation: Any) -> Iterator[Any]:
    """Iterate over the values of all ``Literal`` in a type."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for part in get_args(annotation):
            yield from literals(part)


class Job(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$")] = "default"
    """Name of the run: 1 to 64 letters, digits, `_`, `.` or `-`. A run with the same output_dir and
    name resumes."""
    output_dir: Annotated[PathText, Field(min_length=1)] = "outputs"
    """Directory of all runs, relative to the current one. This run writes to
    <output_dir>/<name>/."""

    @property
    def folder(self) -> Path:
        return Path(self.output_dir) / self.name


class Model(Section):
    name: str = "llama3"
    """Model family: a key of models.MODEL_SPECS, or module:attribute of your own ModelSpec."""
    flavor: PathText = "debugmodel"
    """Size within the family, for example debugmodel or 8B; or a Hugging Face config.json, a folder
    with one, or hf:OWNER/NAME as in data.tokenizer."""
    args: dict[str, Any] = {}
    """[model.args]: arguments of the family that differ from the flavor's, for example n_layers,
    dim, n_heads, n_kv_heads, head_dim, hidden_dim, rope_theta or tie_embeddings."""
    vocab_size: Count | None = None
    """Rows of the embedding. Absent: the tokenizer's vocabulary size rounded up to a multiple of
    64."""

    @property
    def is_outside(self) -> bool:
        """True for the user's own model, of which nothing is known but its ``ModelSpec``."""
        return ":" in self.name


Packing = Literal["concat", "best_fit"]


SourceType = Literal["builtin", "files", "text", "tokens", "c4", "huggingface"] | Outside


class DocumentSource(Section):
    """Documents, to train on or for validation."""

    type: SourceType = "files"
    """Kind of source. builtin: source code of Python and PyTorch. files: text, JSON, CSV, Parquet
    or Arrow files, by their content. text: files as plain text, also JSON and CSV.
    tokens: output of shardloom prepare or Megatron-LM's preprocessing. c4, huggingface: streamed
    from the Hugging Face Hub. module:attribute: a class of your own."""
    path: PathText = ""
    """files, text: a glob (** recurses), or a URL (s3://bucket/**/*.txt). tokens: a directory, or a
    glob of .idx files, or their URL. huggingface: the dataset's name. module:attribute: its
    argument path, if set."""
    subset: str = ""
    """huggingface: configuration of the dataset, for example "en"."""
    revision: str = ""
    """c4, huggingface: commit, tag or branch of the dataset; a branch that has moved is an error on
    resume. Absent: the newest commit of the main branch, which the run keeps."""
    text_key: Annotated[str, Field(min_length=1)] = "text"
    """Column that holds the text in JSON, CSV, Parquet, Arrow and huggingface sources."""
    args: dict[str, Any] = {}
    """module:attribute: arguments of the class."""
    name: str = ""
    """Label of the source in messages and metrics. Absent: the last path component without
    wildcards, or the type."""

    @property
    def is_outside(self) -> bool:
        """True if the documents come from code outside of this repository."""
        return ":" in self.type

    @property
    def is_on_hub(self) -> bool:
        return self.type in ("c4", "huggingface")

    @property
    def label(self) -> str:
        parts = [part for part in self.path.split("/") if part and not set(part) & set("*?[")]
        return self.name or (parts[-1] if parts else self.path or self.type)


class DataSource(DocumentSource):
    weight: Annotated[float, Field(gt=0.0)] = 1.0
    """Relative sampling weight in tokens. The source's fraction is its weight over the sum of
    weights."""
    repeat: bool = True
    """Restart the source when it is exhausted. If false, it drops out of the mixture; training
    stops when all sources have."""


# Keys of [data] that are those of its only source.
ONE_SOURCE = ("path", "subset", "revision", "text_key", "args")


class Data(Section):
    source: SourceType = "builtin"
    """Type of the only source, as in [[data.sources]]."""
    path: PathText = ""
    """Path of the only source, as in [[data.sources]]."""
    subset: str = ""
    """Configuration of a huggingface dataset."""
    revision: str = ""
    """Commit, tag or branch of a c4 or huggingface dataset; a branch that has moved is an error on
    resume. Absent: the newest commit of the main branch, which the run keeps."""
    text_key: Annotated[str, Field(min_length=1)] = "text"
    """Column that holds the text."""
    args: dict[str, Any] = {}
    """[data.args]: arguments of a source that is module:attribute."""
    sources: list[DataSource] = []
    """[[data.sources]]: a mixture of sources. Replaces source, path, subset, revision, text_key and
    args."""
    tokenizer: Annotated[PathText, Field(min_length=1)] = "bytes"
    """bytes; the name of a tiktoken encoding (cl100k_base); a tokenizer.json, SentencePiece model,
    rank file or directory with one; or a repository of the Hugging Face Hub, hf:OWNER/NAME or
    hf:OWNER/NAME@REVISION, in the local cache: ./shardloom fetch hf:OWNER/NAME downloads it."""
    bos: str | None = None
    """Name of the token that begins each document; "": none does. Absent: the one that the
    tokenizer's files put there."""
    eos: Annotated[str, Field(min_length=1)] | None = None
    """Name of the token that ends each document. Absent: the one that the tokenizer's files
    name."""
    packing: Packing = "concat"
    """Packing of documents into sequences. concat: concatenate, and split at sequence ends.
    best_fit: split only documents longer than a sequence, pad the rest of a sequence, and never
    predict a token of another document."""
    document_mask: bool = False
    """Attend only within a document, and restart positions at each document."""
    validation_percent: Annotated[float, Field(ge=0.0, le=50.0)] = 2.0
    """Percent of the documents held out for validation, selected by a hash of path and row; at
    least one document. huggingface: by a hash of the text, if there is no split validation."""
    on_bad_record: Literal["error", "skip"] = "error"
    """Policy for a record without text, or one that is not valid UTF-8 or JSON. error: stop and
    report its location. skip: count it and continue with the next record."""
    max_bad_records: Count = 1000
    """With on_bad_record skip: stop after more bad records than this, counted each time one is
    read."""
    prefetch: Count = 2
    """Microbatches that a background thread prepares ahead."""

    @property
    def mixture(self) -> list[DataSource]:
        """All sources of the run, also if there is only one."""
        one = {key: getattr(self, key) for key in ONE_SOURCE}
        return list(self.sources) or [DataSource(type=self.source, **one)]


class BatchSizePhase(Section):
    steps: Count
    """Optimizer steps with this batch size."""
    global_batch_size: Count
    """Sequences per step over all ranks."""


class Training(Section):
    steps: Count = 1000
    """Optimizer steps of the whole run."""
    seq_len: Count = 2048
    """Tokens per sequence."""
    local_batch_size: Literal["auto"] | Count = 8
    """Sequences per microbatch on each data-parallel rank. A pipeline splits it further. auto: the
    largest that fits; requires global_batch_size."""
    global_batch_size: Count | None = None
    """Sequences per step over all ranks. More than one microbatch per rank accumulates gradients.
    Absent: one microbatch on every rank."""
    batch_size_ramp: list[BatchSizePhase] = []
    """[[training.batch_size_ramp]]: phases with smaller, growing batches at the start of the
    run."""
    dtype: Dtype = "float32"
    """Dtype of weights, gradients and optimizer state. float64 runs everything in float64."""
    mixed_precision_param: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype of forward and backward. auto: bfloat16 if the hardware supports it, else
    float32. The loss is always computed in float32 or float64."""
    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """Dtype of gradient reductions over data-parallel ranks."""
    max_norm: Annotated[float, Field(gt=0.0)] = 1.0
    """Maximum global L2 norm of the gradients; larger gradients are clipped."""
    gc_freq: Count = 50
    """Steps between Python garbage collections, which run on all ranks at the same step."""

    @property
    def decided_local_batch_size(self) -> int:
        """``local_batch_size``, after ``check_constraints``, which rejects "auto"."""
        if self.local_batch_size == "auto":
            raise ValueError("training.local_batch_size: is not decided")
        return self.local_batch_size


class Optimizer(Section):
    name: Literal["adamw", "muon"] | Outside = "adamw"
    """adamw; muon: Muon for hidden matrices and AdamW for all other parameters, with the same lr
    and weight_decay; or module:attribute of your own torch.optim.Optimizer."""
    args: dict[str, Any] = {}
    """[optimizer.args]: arguments of your own optimizer besides lr and weight_decay."""
    lr: Annotated[float, Field(gt=0.0)] = 3e-4
    """Peak learning rate."""
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """Decay of AdamW's first moment."""
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """Decay of AdamW's second moment."""
    eps: Annotated[float, Field(gt=0.0)] = 1e-8
    """AdamW's epsilon, added to the square root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    """Decoupled weight decay. Applies to matrices and Qwen3-Next's norms around zero, not to other
    norms, biases and embeddings."""
    muon_momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """Decay of Muon's Nesterov momentum."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of moments and momentum if weights are float32. bfloat16 halves their memory."""
    param_remainders: bool = True
    """If weights are bfloat16, store for each the 16 bits that make it a float32 weight, so that
    small updates are not lost. 2 bytes per parameter."""

    @property
    def is_outside(self) -> bool:
        """True for the user's own optimizer."""
        return ":" in self.name


class LrScheduler(Section):
    warmup_steps: NonNegative = 200
    """Steps of linear warmup from 0."""
    decay_ratio: Fraction = 1.0
    """Fraction of total_steps spent decaying, at the end. 1.0 decays from the end of warmup, 0.2 is
    warmup-stable-decay, 0.0 never decays."""
    decay_type: Literal["cosine", "linear", "sqrt"] | Outside = "cosine"
    """Shape of the decay; or module:attribute of your own function (step, total_steps, ...) that
    returns the factor on the peak learning rate, and replaces warmup and decay."""
    args: dict[str, Any] = {}
    """[lr_scheduler.args]: arguments of your own function."""
    min_lr_factor: Fraction = 0.1
    """Final learning rate as a fraction of the peak."""
    total_steps: Count | None = None
    """Length of the schedule in steps, at least training.steps. Set it to extend a run later on the
    same curve. Absent: training.steps."""

    @property
    def is_outside(self) -> bool:
        """True for the user's own function."""
        return ":" in self.decay_type


ContextParallelMethod = Literal["ulysses", "allgather"]
PipelineSchedule = Literal["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble"]


class Parallelism(Section):
    data_parallel: Literal["fsdp2", "simple_fsdp", "ddp"] = "fsdp2"
    """fsdp2: FSDP2 shards weights, gradients and optimizer state. simple_fsdp: the same sharding as
    DTensor operations, visible to torch.compile. ddp: each rank keeps a full replica."""
    data_parallel_replicate_degree: Count = 1
    """Replicas of the sharded model (HSDP). With ddp, all remaining ranks replicate."""
    data_parallel_shard_degree: Literal[-1] | Count = -1
    """Ranks that shard one replica (FSDP). -1: all remaining ranks."""
    tensor_parallel_degree: Count = 1
    """Ranks that shard each weight matrix, with sequence parallelism between matrices."""
    tensor_parallel_async: bool = False
    """Async tensor parallelism: overlap its collectives with the GEMMs. Needs GPUs and
    compile.enable."""
    context_parallel_degree: Count = 1
    """Ranks that shard each sequence."""
    context_parallel_method: ContextParallelMethod = "ulysses"
    """Communication of context-parallel attention. ulysses: all-to-all, so each rank attends over
    the whole sequence with some of the heads. allgather: all-gather keys and values; any number of
    heads."""
    pipeline_parallel_degree: Count = 1
    """Ranks that split the layers into pipeline stages."""
    pipeline_parallel_schedule: PipelineSchedule = "1F1B"
    """Pipeline schedule. 1F1B: stores few activations. GPipe: all forwards first. Interleaved1F1B:
    several stages per rank, so a smaller bubble. InterleavedZeroBubble: also fills the bubble with
    weight gradients (experimental)."""
    pipeline_parallel_microbatch_size: Count = 1
    """Sequences per pipeline microbatch. Must divide training.local_batch_size."""
    pipeline_parallel_stages_per_rank: Annotated[int, Field(ge=2)] = 2
    """Stages on each rank with an interleaved schedule."""
    pipeline_parallel_first_stage_less_layers: NonNegative = 1
    """Number of layers that the embedding counts as when layers are assigned to stages."""
    pipeline_parallel_last_stage_less_layers: NonNegative = 1
    """Number of layers that the output counts as when layers are assigned to stages."""
    expert_parallel_degree: Count = 1
    """Ranks that shard the experts of MoE layers. Must divide data_parallel_shard_degree times
    context_parallel_degree times tensor_parallel_degree."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] | Count = "default"
    """When to free gathered weights. always: after each forward (in a pipeline, not those of
    experts). never: at the end of the step (simple_fsdp: of backward). An integer: after forward,
    keep them sharded over groups of that many ranks; PyTorch makes communicators for each unit,
    which take time at the start and memory. default: always, except for the last unit; but
    never on one rank and in an fsdp2 pipeline, where each microbatch would gather again."""
    fsdp_reduce_gradients: Literal["every_microbatch", "last_microbatch"] = "every_microbatch"
    """When to reduce-scatter gradients. last_microbatch: less communication, but every rank holds
    unsharded gradients until then. An fsdp2 pipeline always does so."""
    fsdp_forward_prefetch: NonNegative = 0
    """Units (a block with its experts) to all-gather ahead in forward; each costs its memory. 0:
    PyTorch's default order."""
    fsdp_backward_prefetch: NonNegative = 0
    """Units (a block with its experts) to all-gather ahead in backward; each beyond the first costs
    its memory. 0: PyTorch's default order, one ahead."""
    fsdp_cpu_offload: bool = False
    """Keep sharded weights, gradients and optimizer state in host memory, and run the optimizer
    there."""


class ActivationCheckpoint(Section):
    mode: Literal["none", "selective", "full", "memory_budget", "auto"] = "selective"
    """Activations to recompute in backward. full: those of every block. selective: see the next
    key. memory_budget: the compiler chooses. none: nothing, except what frees gathered weights
    under simple_fsdp. auto: the first of none, selective and full that fits."""
    selective: Literal["op"] | Count = "op"
    """With mode selective. op: save attention and every second matmul, recompute the rest. An
    integer n: recompute every n-th block completely."""
    memory_budget: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """With mode memory_budget: fraction of a compiled block's activations to keep. 1: the
    compiler's default. 0: only the block's inputs."""


class Compile(Section):
    enable: bool = False
    """Apply torch.compile to each block and to the loss."""
    backend: Annotated[str, Field(min_length=1)] = "inductor"
    """Backend of torch.compile."""
    cuda_graphs: Literal["auto", "always", "never"] = "auto"
    """Capture forward and backward of a microbatch once as a CUDA graph, which the host launches at
    once, and the update as another; with compile.enable or without. auto: on one GPU. always: also
    on several; an error if something prevents it."""


class Float8(Section):
    recipe: Literal["none", "tensorwise", "rowwise"] = "none"
    """Run the GEMMs of the blocks' linear layers in float8. tensorwise: one scale per tensor
    (fastest). rowwise: one scale per row (more accurate)."""
    skip: list[str] = []
    """Linear layers with these names in their FQNs are not converted, for example `wo`,
    `layers.0` or `layers.0.attention`."""
    skip_small: bool = True
    """Do not convert layers that are too small to run faster in float8."""
    emulate: bool = False
    """Round to float8 but multiply in float32, for tests on devices without float8."""


class Checkpoint(Section):
    enable: bool = True
    """Save checkpoints, and resume from the newest verified one."""
    interval: Count = 500
    """Steps between checkpoints. The last step is always saved."""
    keep_latest_k: NonNegative = 3
    """Number of newest checkpoints to keep. 0 keeps all."""
    keep_every: NonNegative = 0
    """Never delete checkpoints of multiples of this many steps. Must be a multiple of interval; 0:
    none."""
    async_mode: Literal["disabled", "async"] = "disabled"
    """async: copy the state to host memory, and write it while training continues."""
    max_unsaved_steps: Count | None = None
    """Failed saves are logged. If no checkpoint succeeds for this many steps, stop with exit code
    1. Absent: 3 * interval."""
    initial_load_path: PathText = ""
    """Checkpoint or Hugging Face model directory to load initial weights from, or hf:OWNER/NAME as
    in data.tokenizer. Ignored if the run has a checkpoint."""


class Numerics(Section):
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Policy for a nonfinite loss or gradient; the update is skipped in any case. stop: skip all
    later updates too, and end the run with exit code 93 at the next step that is logged or saved.
    skip: continue with the next step. The log then names the loss or the first gradient."""
    max_skipped: Count = 3
    """With on_nonfinite skip: end the run after this many consecutive nonfinite steps."""
    on_spike: Literal["ignore", "rollback"] = "ignore"
    """Policy for a loss or gradient norm far above the recent ones. rollback: load the newest
    verified checkpoint and skip the data read since."""
    spike_window: Annotated[int, Field(ge=8)] = 128
    """Number of recent steps to compare with."""
    spike_sigmas: Annotated[float, Field(gt=0.0)] = 6.0
    """Standard deviations above the window's mean that count as a spike."""
    max_rollbacks: Count = 3
    """Rollbacks per run. One more spike ends the run."""
    replica_check_freq: NonNegative = 0
    """Steps between bitwise comparisons of data-parallel replicas. 0: only before the first
    step."""


class Experts(Section):
    balance_loss: Annotated[float, Field(ge=0.0)] = 1e-2
    """Weight of the sequence-wise auxiliary load-balancing loss (arXiv 2412.19437). 0: off."""
    balance_bias_rate: Annotated[float, Field(ge=0.0)] = 0.0
    """Step size of the router bias that balances load without a loss (arXiv 2408.15664). 0: off."""


class ValidationSource(DocumentSource):
    name: Annotated[str, Field(min_length=1)]
    """Label of the source in messages and metrics: its loss is validation_loss/NAME."""
    split: Annotated[str, Field(min_length=1)] = "validation"
    """c4, huggingface: split of the dataset."""
    exclude_from_training: bool = False
    """files, text, tokens: leave these files out of [data], whose patterns may match them too.
    false: such a file is an error."""


class Validation(Section):
    enable: bool = True
    """Evaluate the loss on documents that are not trained on."""
    sources: list[ValidationSource] = []
    """[[validation.sources]]: documents to evaluate. Absent: those that data.validation_percent
    holds out from each source of [data]."""
    freq: Count = 100
    """Steps between validations. One also runs before the first step and after the last."""
    steps: Count | Literal["all"] = 10
    """Global batches per source and validation, the same ones each time, or fewer where the
    documents end. all: every document once."""
    sample_tokens: NonNegative = 0
    """Tokens of each sample from the model, at every validation and at the end of the run. Each
    costs a forward pass. 0: no samples."""
    sample_prompt: str = ""
    """Prompt of the sample."""
    sample_prompts: list[str] = []
    """Prompts of several samples. Replaces sample_prompt."""


class Metrics(Section):
    log_freq: Count = 10
    """Steps between log lines."""
    enable_ledger: bool = False
    """Record the data consumed by each step in ledger/, for `./shardloom check-ledger`."""
    straggler_window: NonNegative = 0
    """Steps between comparisons of the ranks' compute times. A rank slow in three consecutive
    windows is logged. 0: off."""
    layer_stats_freq: NonNegative = 0
    """Steps between records of statistics per layer: norms of weights, gradients and updates,
    activations, attention logits, dead experts. Each takes one more forward pass. 0: off."""
    trackers: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = ["tensorboard"]
    """Destinations of metrics, samples and alarms besides metrics.jsonl. wandb, mlflow and trackio
    need their package; docs/howto/trackers.md has their environment variables."""
    project: Annotated[str, Field(min_length=1)] = "shardloom"
    """Project of wandb and trackio, experiment of mlflow, in which the run is called job.name."""
    peak_tflops: Annotated[float, Field(gt=0.0)] | None = None
    """Peak TFLOP/s of one device, for MFU. Absent: a built-in value for common GPUs, else MFU is
    n/a."""


class Profiling(Section):
    enable_trace: bool = False
    """Write torch.profiler traces of every rank to traces/, for shardloom profile."""
    trace_freq: Annotated[int, Field(ge=3)] = 100
    """Steps between traces, and between memory snapshots. A trace covers the last 2 steps, and by
    name the validation and saving between them."""
    enable_memory_snapshot: bool = False
    """Write CUDA memory snapshots to traces/ (view at pytorch.org/memory_viz)."""


class Comm(Section):
    init_timeout_seconds: Seconds = 600
    """Timeout of collectives, in seconds, until the first step is done."""
    train_timeout_seconds: Seconds = 300
    """Timeout of collectives, in seconds, after the first step. A rank that another waits for may
    be late by as much, also in a save, which itself may take longer. On CPUs, what pipeline stages
    send keeps the timeout of the start."""


class Debug(Section):
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the initial weights and the data order."""
    deterministic: bool | Literal["elastic"] = False
    """Use deterministic kernels only, which are slower: equal bit for bit on equal meshes.
    "elastic": also on any data_parallel_shard_degree that is a power of two."""

    @property
    def is_elastic(self) -> bool:
        return self.deterministic == "elastic"


class JobConfig(Section):
    """Configuration of a whole run. Code that needs one section takes that section."""

    job: Job = Job()
    model: Model = Model()
    data: Data = Data()
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LrScheduler = LrScheduler()
    parallelism: Parallelism = Parallelism()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    float8: Float8 = Float8()
    checkpoint: Checkpoint = Checkpoint()
    numerics: Numerics = Numerics()
    experts: Experts = Experts()
    validation: Validation = Validation()
    metrics: Metrics = Metrics()
    profiling: Profiling = Profiling()
    comm: Comm = Comm()
    debug: Debug = Debug()
