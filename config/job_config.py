"""Every TOML table and every key of a run, with its range and one line on what it does.

Sections are frozen and strict: nothing is coerced, an unknown key is an error. The text under a
field is its help (``./run_train.sh --help``) and its description in ``config/schema.json``.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Dtype = Literal["float64", "float32", "bfloat16"]


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class Job(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$")] = "default"
    """Name of the run; a run of the same output_dir and name resumes."""
    output_dir: Annotated[str, Field(min_length=1)] = "outputs"
    """Folder of all runs; this one writes to <output_dir>/<name>/."""

    @property
    def folder(self) -> Path:
        return Path(self.output_dir) / self.name


class Model(Section):
    name: str = "llama3"
    """Model family: a key of models.MODEL_SPECS, or module:attribute of a ModelSpec of your own."""
    flavor: str = "debugmodel"
    """Size within the family, e.g. debugmodel, 8B."""
    vocab_size: Count | None = None
    """Rows of the embedding. Absent: the tokenizer's vocabulary, rounded up to a multiple of 64."""


Packing = Literal["concat", "best_fit"]


class DataSource(Section):
    type: Literal["builtin", "files", "tokens", "c4", "huggingface"] = "files"
    """builtin: source text of Python and torch. files: local text. tokens: what tools.prepare or
    Megatron-LM tokenized. c4, huggingface: streamed."""
    path: str = ""
    """files: a glob of .txt, .jsonl or .parquet (** recurses). tokens: a folder, or a glob of .idx.
    huggingface: the dataset's name."""
    subset: str = ""
    """huggingface: configuration of the dataset, e.g. "en"."""
    text_key: Annotated[str, Field(min_length=1)] = "text"
    """Column that holds the text in .jsonl, .parquet and huggingface sources."""
    weight: Annotated[float, Field(gt=0.0)] = 1.0
    """Share of the tokens, beside the other sources' weights."""
    repeat: bool = True
    """Begin again after the last document. Else the others go on without it, and when the last of
    them has ended, so has the run."""

    name: str = ""
    """What it is called in messages and metrics. Absent: the last part of its path that is no
    pattern, or its type."""

    @property
    def label(self) -> str:
        parts = [part for part in self.path.split("/") if part and not set(part) & set("*?[")]
        return self.name or (parts[-1] if parts else self.path or self.type)


class Data(Section):
    source: Literal["builtin", "files", "tokens", "c4", "huggingface"] = "builtin"
    """What is read, if it is one source: the type, as in [[data.sources]]."""
    path: str = ""
    """As in [[data.sources]], like the next two."""
    subset: str = ""
    """Of a huggingface dataset."""
    text_key: Annotated[str, Field(min_length=1)] = "text"
    """Column that holds the text."""
    sources: list[DataSource] = []
    """[[data.sources]]: a mixture, instead of source, path, subset and text_key."""
    tokenizer: Annotated[str, Field(min_length=1)] = "bytes"
    """bytes; a tiktoken encoding (cl100k_base); a .tiktoken/.model rank file; a tokenizer.json."""
    packing: Packing = "concat"
    """concat: documents follow each other and are cut where a sequence ends. best_fit: documents
    that fit into a sequence are not cut, what is left over is filled, and no label is of another
    document."""
    document_mask: bool = False
    """Attend only within a document, and restart positions at each document."""
    validation_percent: Annotated[float, Field(ge=0.0, le=50.0)] = 2.0
    """Percent of builtin or local documents held out, chosen by a hash of path and row."""
    on_bad_record: Literal["error", "skip"] = "error"
    """A record without text, that is not UTF-8 or not JSON. error: end, and say where it is. skip:
    go on with the next one, and count."""
    max_bad_records: Count = 1000
    """skip: more of them, counted each time they are read, end the run."""
    prefetch: Count = 2
    """Microbatches prepared ahead, in a thread."""

    @property
    def mixture(self) -> list[DataSource]:
        """The sources, however they are given."""
        one = {key: getattr(self, key) for key in ("path", "subset", "text_key")}
        return list(self.sources) or [DataSource(type=self.source, **one)]


class BatchSizePhase(Section):
    steps: Count
    """Optimizer updates with this batch size."""
    global_batch_size: Count
    """Sequences per step over all ranks."""


class Training(Section):
    steps: Count = 1000
    """Optimizer updates of the whole run."""
    seq_len: Count = 2048
    """Tokens per sequence."""
    local_batch_size: Count = 8
    """Sequences per microbatch on each data-parallel rank; a pipeline cuts it further."""
    global_batch_size: Count | None = None
    """Sequences per step over all ranks; more than one microbatch each accumulates gradients.
    Absent: one microbatch on every rank."""
    batch_size_ramp: list[BatchSizePhase] = []
    """[[training.batch_size_ramp]]: phases with smaller batches, which the run begins with."""
    dtype: Dtype = "float32"
    """Dtype of weights, gradients and optimizer state. float64 runs everything in float64."""
    mixed_precision_param: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of compute. auto: bfloat16 where the hardware has it, else float32. The loss is
    computed in float32 at least."""
    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """Dtype of gradient reduction over data-parallel ranks."""
    max_norm: Annotated[float, Field(gt=0.0)] = 1.0
    """Global gradient norm to clip to."""
    gc_freq: Count = 50
    """Steps between garbage collections, which otherwise stall ranks at random."""


class Optimizer(Section):
    name: Literal["adamw", "muon"] = "adamw"
    """muon: hidden matrices by Muon, all else by AdamW, with the same lr and weight_decay."""
    lr: Annotated[float, Field(gt=0.0)] = 3e-4
    """Peak learning rate."""
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """Decay of AdamW's first moment."""
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """Decay of AdamW's second moment."""
    eps: Annotated[float, Field(gt=0.0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    """Decoupled weight decay, on matrices only: not on norms, biases and embeddings."""
    muon_momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """Decay of Muon's momentum, which is Nesterov's."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of moments and momentum of float32 weights. bfloat16 halves their memory."""


class LrScheduler(Section):
    warmup_steps: NonNegative = 200
    """Steps of linear warmup from 0."""
    decay_ratio: Fraction = 1.0
    """Share of total_steps spent decaying at the end: 1.0 starts after warmup, 0.2 holds first
    (warmup-stable-decay), 0.0 never decays."""
    decay_type: Literal["cosine", "linear", "sqrt"] = "cosine"
    """Shape of the decay."""
    min_lr_factor: Fraction = 0.1
    """Final learning rate as a share of the peak."""
    total_steps: Count | None = None
    """Horizon of the schedule. Absent: training.steps. Set it to extend a run on the same curve."""


ContextParallelMethod = Literal["ulysses", "allgather"]
PipelineSchedule = Literal["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble"]


class Parallelism(Section):
    data_parallel: Literal["fsdp2", "simple_fsdp", "ddp"] = "fsdp2"
    """fsdp2: each rank keeps a shard of weights, gradients and optimizer state. simple_fsdp: the
    same, as DTensor operations that a compiler can see. ddp: each rank keeps everything."""
    data_parallel_replicate_degree: Count = 1
    """Copies of the sharded model (HSDP). With ddp: all the ranks that are left."""
    data_parallel_shard_degree: Literal[-1] | Count = -1
    """Ranks that share one copy of the weights (FSDP). -1: the ranks that are left."""
    tensor_parallel_degree: Count = 1
    """Ranks that split each matrix, with sequence parallelism between them."""
    tensor_parallel_async: bool = False
    """Overlap the collectives of tensor parallelism with its matrix products, in compiled code."""
    context_parallel_degree: Count = 1
    """Ranks that split each sequence."""
    context_parallel_method: ContextParallelMethod = "ulysses"
    """How attention sees the whole sequence. ulysses: each rank attends with some of the heads.
    allgather: keys and values are gathered; for any number of heads."""
    pipeline_parallel_degree: Count = 1
    """Ranks that split the layers."""
    pipeline_parallel_schedule: PipelineSchedule = "1F1B"
    """Order of a step's forwards and backwards. 1F1B: keeps few activations. GPipe: all forwards
    first. Interleaved1F1B: several stages on each rank, to wait less. InterleavedZeroBubble: also
    fills the waiting with gradients of weights (experimental)."""
    pipeline_parallel_microbatch_size: Count = 1
    """Sequences that travel together: training.local_batch_size is cut into these."""
    pipeline_parallel_stages_per_rank: Annotated[int, Field(ge=2)] = 2
    """Stages on each rank with an interleaved schedule."""
    pipeline_parallel_first_stage_less_layers: NonNegative = 1
    """How many layers the embedding counts as when layers are dealt out to stages."""
    pipeline_parallel_last_stage_less_layers: NonNegative = 1
    """How many layers the output counts as."""
    expert_parallel_degree: Count = 1
    """Ranks that split the experts."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] | Count = "default"
    """Free gathered weights after forward. default: yes, but for the last unit, and not in a
    pipeline, which would gather them for every microbatch, nor on one rank, whose weights are only
    cast. never: keep them for the whole step. An integer: keep them spread over groups of that many
    ranks."""
    fsdp_reduce_gradients: Literal["every_microbatch", "last_microbatch"] = "every_microbatch"
    """When gradients are reduced to shards. last_microbatch: less traffic, but until then every
    rank holds whole gradients. A pipeline of fsdp2 does that in any case."""
    fsdp_forward_prefetch: NonNegative = 0
    """Units gathered ahead in forward, at the price of their memory; 0: PyTorch's own order. A
    unit is a block with its experts."""
    fsdp_backward_prefetch: NonNegative = 0
    """Units gathered ahead in backward, more than one at the price of their memory; 0: PyTorch's
    own order, one ahead. A unit is a block with its experts."""
    fsdp_cpu_offload: bool = False
    """Keep shards, gradients and optimizer state in host memory, and update them there."""


class ActivationCheckpoint(Section):
    mode: Literal["none", "selective", "full", "memory_budget"] = "selective"
    """What backward recomputes. full: every block. none: nothing, but what frees gathered weights
    under simple_fsdp. memory_budget: what the compiler finds cheapest."""
    selective: Literal["op"] | Count = "op"
    """With mode selective. op: keep attention and every second matmul, recompute the rest.
    An integer n: recompute every n-th block as a whole."""
    memory_budget: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """With mode memory_budget, what of a compiled block's activations is kept. 1: what the compiler
    would keep by itself. 0: only the block's inputs."""


class Compile(Section):
    enable: bool = False
    """torch.compile each block, and the loss."""
    backend: Annotated[str, Field(min_length=1)] = "inductor"
    """Backend of torch.compile."""


class Float8(Section):
    recipe: Literal["none", "tensorwise", "rowwise"] = "none"
    """Products of the blocks' linear layers in float8. tensorwise: one scale for a matrix, the
    faster. rowwise: one for each row, the more exact."""
    skip: list[str] = []
    """Layers whose names have one of these parts stay as they are, such as `0.attention`."""
    skip_small: bool = True
    """Leave out layers too small to pay."""
    emulate: bool = False
    """Round to float8, but multiply in float32: for tests, on devices without float8."""


class Checkpoint(Section):
    enable: bool = True
    """Save checkpoints, and resume from the newest verified one."""
    interval: Count = 500
    """Steps between checkpoints; the last step is always saved."""
    keep_latest_k: NonNegative = 3
    """Checkpoints to keep; 0 keeps all."""
    keep_every: NonNegative = 0
    """Keep checkpoints of multiples of that many steps for good; 0: none."""
    async_mode: Literal["disabled", "async"] = "disabled"
    """async: copy the state to host memory, and write it while training goes on."""
    max_unsaved_steps: Count | None = None
    """A save that fails is an alarm; so many steps without a new checkpoint end the run.
    Absent: three intervals."""
    initial_load_path: str = ""
    """Checkpoint or Hugging Face folder to take the weights from when the run has no checkpoint of
    its own."""


class Numerics(Section):
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A loss or gradient that is not finite never updates the weights. stop: end the run there.
    skip: go on with the next step."""
    max_skipped: Count = 3
    """skip: so many steps in a row that are not finite end the run."""
    on_spike: Literal["ignore", "rollback"] = "ignore"
    """A loss or gradient norm far above the recent ones. rollback: go back to the newest verified
    checkpoint and leave out the data since then."""
    spike_window: Annotated[int, Field(ge=8)] = 128
    """Steps that a spike is compared with."""
    spike_sigmas: Annotated[float, Field(gt=0.0)] = 6.0
    """Standard deviations above their mean that make a spike."""
    max_rollbacks: Count = 3
    """Rollbacks in a run; one more ends it."""
    replica_check_freq: NonNegative = 0
    """Steps between bitwise comparisons of replicas; 0: only before the first step."""


class Experts(Section):
    balance_loss: Annotated[float, Field(ge=0.0)] = 1e-2
    """Weight of the loss that evens out the experts' load in each sequence; 0: none."""
    balance_bias_rate: Annotated[float, Field(ge=0.0)] = 0.0
    """How far the bias in an expert's choice moves in a step, against its load; 0: not at all."""


class Validation(Section):
    enable: bool = True
    """Measure the loss on held-out documents."""
    freq: Count = 100
    """Steps between validations; one is made before the first step and one after the last."""
    steps: Count = 10
    """Batches per validation, the same ones every time."""
    sample_tokens: NonNegative = 0
    """Tokens of text the model writes at the end of the run; 0: none."""
    sample_prompt: str = ""
    """What that text starts with."""


class Metrics(Section):
    log_freq: Count = 10
    """Steps between log lines."""
    enable_ledger: bool = False
    """Write what each step consumed to ledger/; `python -m tools.check_ledger` reads it."""
    straggler_window: NonNegative = 0
    """Steps after which the ranks' compute times are compared, to name those that are slow in three
    windows; 0: never."""
    enable_tensorboard: bool = True
    """Write TensorBoard events beside metrics.jsonl."""
    peak_tflops: Annotated[float, Field(gt=0.0)] | None = None
    """Peak TFLOP/s of one device for MFU. Absent: known for common GPUs, else MFU is n/a."""


class Profiling(Section):
    enable_trace: bool = False
    """Write a torch profiler trace of every rank to traces/."""
    trace_freq: Annotated[int, Field(ge=3)] = 100
    """Steps between traces, each of the last 2 of them, and between memory snapshots."""
    enable_memory_snapshot: bool = False
    """Write CUDA memory snapshots to traces/ (view at pytorch.org/memory_viz)."""


class Comm(Section):
    init_timeout_seconds: Count = 600
    """Limit of a collective until the first step is done."""
    train_timeout_seconds: Count = 300
    """Limit of a collective afterwards, and of what others wait for, such as a save."""


class Debug(Section):
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seeds the weights and the order of the data."""
    deterministic: bool = False
    """Deterministic kernels only; slower."""
    determinism: Literal["same_mesh", "elastic"] = "same_mesh"
    """Which runs are equal bit for bit. same_mesh: those on equal meshes. elastic: also those whose
    data_parallel_shard_degree, a power of two, differs; gradients are added in a fixed order."""

    @property
    def is_elastic(self) -> bool:
        return self.determinism == "elastic"


class JobConfig(Section):
    """A whole run. Only what checks or starts one takes it; everything else takes a section."""

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
