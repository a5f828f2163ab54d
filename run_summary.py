"""The plan of a run in a few log lines before its first step: what it does, and what is off."""

import platform

import torch
import torch.nn as nn

from build_model import ShardedModel
from config import JobConfig
from data.batch_size import sequences_in
from parallelisms.parallel_dims import ParallelDims
from report.schedule_plan import MAX_STEPS, plan_schedule
from report.schedule_text import draw_schedule
from run_spec import RunSpec
from runtime.dtensor import to_local
from runtime.log import logger, plain_number
from runtime.machine import available_cpus
from runtime.release import warn_if_untested
from runtime.torch_device import device_name

# A bfloat16 sum loses addends that it exceeds by 2^8 or more.
MOST_BFLOAT16_SUMS = 128
# Documents whose length stands for that of all, and characters after which no more are read.
PROBED_DOCUMENTS, PROBED_CHARACTERS = 64, 1 << 22


def log_machine(dims: ParallelDims, config: JobConfig, device: torch.device) -> None:
    """Log what the run runs on: the hardware, and the mesh of its ranks."""
    n_ranks = dims.weight_mesh.size()
    threads = f", {available_cpus()} cores" if device.type == "cpu" else ""
    logger.info(
        "hardware: %d rank%s on %s (%s%s); PyTorch %s, Python %s",
        n_ranks, "s" * (n_ranks > 1), device.type, device_name(device), threads,
        torch.__version__, platform.python_version(),
    )  # fmt: skip
    degrees = {**vars(dims.degrees), "ep": config.parallelism.expert_parallel_degree}
    used = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    logger.info("mesh: %s", ", ".join(used) or "one rank")
    warn_if_untested()


def log_plan(
    run: RunSpec,
    model: ShardedModel,
    optimizer: torch.optim.Optimizer,
    resumed_step: int | None,
    *,
    resumed_tokens: int,
) -> None:
    """Log batch, tokens, learning rate, memory, folder, and what is off with the key for it."""
    training, policy = run.config.training, model.mp_policy
    remainders = " with remainders" * getattr(optimizer, "has_remainders", False)
    logger.info(
        "precision: weights %s%s, compute %s, gradient reduction %s",
        training.dtype, remainders, _name(policy.param_dtype), _name(policy.reduce_dtype),
    )  # fmt: skip
    n_microbatches = run.n_microbatches(model.dims.degrees.batch)
    if training.dtype == "bfloat16" and n_microbatches > MOST_BFLOAT16_SUMS:
        logger.warning(
            "precision: gradients of %d microbatches are added in bfloat16, which loses a part of"
            " them from about %d on: raise training.local_batch_size", n_microbatches,
            MOST_BFLOAT16_SUMS,
        )  # fmt: skip
    state_bytes = None if run.config.optimizer.is_outside else optimizer_bytes(optimizer)
    logger.info("memory: %s", memory_text(model.module, state_bytes, model.device))
    lines = plan_lines(
        run,
        batch_degree=model.dims.degrees.batch,
        flops_per_token=model.flops_per_token[0],
        resumed=(resumed_step or 0, resumed_tokens),
    )
    for line in lines[:-1]:
        logger.info("%s", line)
    logger.info("%s", lines[-1], extra={"event": {"drawing": drawing(run)}})
    start = "from step 1" if resumed_step is None else f"resumed after step {resumed_step}"
    logger.info("folder: %s, %s", run.folder, start)
    logger.info("off: %s", ", ".join(f"{what} ({why})" for what, why in off(run, model).items()))


def plan_lines(
    run: RunSpec,
    *,
    batch_degree: int,
    flops_per_token: float,
    resumed: tuple[int, int] = (0, 0),
) -> list[str]:
    """Lines about the batch, the work, and the learning rate, in this order.

    ``batch_degree``: ranks that read different sequences. ``flops_per_token``: by PaLM's
    convention. ``resumed``: steps and tokens trained so far, perhaps with another ramp.
    """
    training, size = run.config.training, run.global_batch_size
    n = run.n_microbatches(batch_degree)
    microbatches = f"{n} microbatch{'es' * (n > 1)}"
    ramp = f", after a ramp from {run.ramp[0][1]} sequences" if run.ramp else ""
    done, total = (sequences_in(steps, run.ramp, size) for steps in (resumed[0], training.steps))
    n_tokens = resumed[1] + (total - done) * training.seq_len
    # Whole documents leave the ends of sequences empty.
    tokens = "up to " * (run.config.data.packing == "best_fit") + f"{n_tokens:,} tokens"
    return [
        f"batch: {size * training.seq_len:,} tokens per step, {size} sequences of"
        f" {training.seq_len:,}; {microbatches} of {run.microbatch_size} on each rank"
        f"{ramp}",
        f"training: {training.steps:,} steps, {tokens}{epochs_text(run, n_tokens)},"
        f" {n_tokens * flops_per_token:.3g} FLOPs",
        f"learning rate: {learning_rate_text(run)}; {run.config.optimizer.name}",
    ]


def learning_rate_text(run: RunSpec) -> str:
    """Peak, warmup, decay, and the learning rate of the last step."""
    config, steps = run.config.lr_scheduler, run.config.training.steps
    peak, total = run.config.optimizer.lr, config.total_steps or steps
    end = f"{peak * run.lr_factor(steps):g} at step {steps}"
    if config.is_outside:
        return f"{peak:g} times {config.decay_type}, {end}"
    if config.warmup_steps >= steps:
        return f"warmup to {end}"
    warmup = f"{peak:g} after {config.warmup_steps} steps of warmup, "
    if not config.decay_ratio:
        return f"{warmup}constant"
    start = max(config.warmup_steps, total - round(config.decay_ratio * total))
    if start == total:
        return f"{warmup}constant: lr_scheduler.decay_ratio of {total} steps is no step"
    decay = f"{warmup}{config.decay_type} decay from step {start} to"
    if steps == total:
        return f"{decay} {end}"
    return f"{decay} {peak * config.min_lr_factor:g} at step {total}; {end}, the last"


def drawing(run: RunSpec) -> list[str]:
    """Lines that draw the learning rate and the batch; [] for a ramp that is too long to draw."""
    config = run.config
    if len(run.ramp) > MAX_STEPS:
        return []
    return draw_schedule(
        plan_schedule(
            config.training, config.lr_scheduler, config.optimizer.lr, factor=run.lr_factor
        )
    )


def off(run: RunSpec, model: ShardedModel) -> dict[str, str]:
    """Return what this run does without, and the key that turns it on, or the reason."""
    config, has_gpu = run.config, model.device.type == "cuda"
    features = {
        "compile": (config.compile.enable, "compile.enable"),
        "CUDA graphs": (not model.without_cuda_graphs, model.without_cuda_graphs),
        "float8": (config.float8.recipe != "none", "float8.recipe"),
        "activation checkpoint": (
            config.activation_checkpoint.mode != "none",
            "activation_checkpoint.mode",
        ),
        "SDPA backend priority": (has_gpu, "no GPU"),
        "mfu": (
            model.peak_flops is not None,
            "metrics.peak_tflops: the device's peak is not known",
        ),
        "checkpoints": (config.checkpoint.enable, "checkpoint.enable"),
        "async saves": (config.checkpoint.async_mode != "disabled", "checkpoint.async_mode"),
        "validation": (config.validation.enable, "validation.enable"),
        "rollback of spikes": (config.numerics.on_spike != "ignore", "numerics.on_spike"),
        "straggler detection": (config.metrics.straggler_window > 0, "metrics.straggler_window"),
        "layer statistics": (config.metrics.layer_stats_freq > 0, "metrics.layer_stats_freq"),
        "ledger": (config.metrics.enable_ledger, "metrics.enable_ledger"),
        "traces": (config.profiling.enable_trace, "profiling.enable_trace"),
    }
    return {what: why for what, (is_on, why) in features.items() if not is_on}


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of this rank's state of an AdamW or Muon, which it allocates in the first step."""
    state = 0
    for group in optimizer.param_groups:
        n_values = 1 if "muon_momentum" in group else 2  # Muon's momentum, or AdamW's moments
        for parameter in group["params"]:
            dtype = getattr(optimizer, "moment_dtype", None) or parameter.dtype
            n_bytes = n_values * dtype.itemsize
            if getattr(optimizer, "has_remainders", False):
                n_bytes += torch.int16.itemsize
            state += n_bytes * to_local(parameter.detach()).numel()
    return state


def memory_text(module: nn.Module, state_bytes: int | None, device: torch.device) -> str:
    """Sizes of this rank's weights, gradients and optimizer state, if that is known beforehand."""
    sizes = {p: to_local(p.detach()).nbytes for p in module.parameters()}
    weights = sum(sizes.values())
    gradients = sum(size for parameter, size in sizes.items() if parameter.requires_grad)
    state = "state that is not known yet" if state_bytes is None else size_text(state_bytes)
    capacity = ""
    if device.type == "cuda":
        capacity = f", of {size_text(torch.cuda.get_device_properties(device).total_memory)}"
    return (
        f"weights {size_text(weights)}, gradients {size_text(gradients)}, optimizer"
        f" {state} on this rank, and activations{capacity}"
    )


def epochs_text(run: RunSpec, n_tokens: int) -> str:
    """Epochs of ``n_tokens``, from the length of the first documents; "" if it is not known."""
    if len(run.training_data.sources) > 1:
        return ""
    (source,) = run.training_data.sources
    if source.n_documents is None:
        return ""
    lengths: list[int] = []
    n_characters = 0
    try:
        for document in source.documents(0, 1, 0):
            if document is not None:
                length = len(document)
                n_characters += length
                if isinstance(document, str) and document:
                    length = len(run.tokenizer.encode_document(document))
                lengths.append(length)
            if len(lengths) == PROBED_DOCUMENTS or n_characters > PROBED_CHARACTERS:
                break
    except (OSError, ValueError):  # Training will report it, or skip it.
        return ""
    mean = sum(lengths) / max(1, len(lengths))
    if mean == 0:
        return ""
    epochs = n_tokens / (mean * source.n_documents)
    if epochs > 1.0 and not run.config.data.mixture[0].repeat:
        return ", more than one epoch, after which the data end"
    # Which counts padding as tokens.
    is_padded = run.config.data.packing == "best_fit"
    return f", {'up to ' * is_padded}about {plain_number(epochs, 2)} epochs"


def size_text(n_bytes: float) -> str:
    """Return a size such as 3.3 MiB."""
    for unit in ("bytes", "KiB", "MiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.{0 if unit == 'bytes' else 1}f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} GiB"


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
