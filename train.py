"""Pretrain a model: ``torchrun --nproc_per_node=N train.py CONFIG.toml [--section.key value ...]``

Reads top to bottom: what is asked for, ranks, data, the model on the meta device, sharding,
weights, optimizer, checkpoint, the loop. ``./run_train.sh`` starts it.
"""

import gc
import json
import os
import sys
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing.errors import record

from checkpoint.checkpointer import Checkpointer
from checkpoint.states import ModelState, OptimizerState
from config import ConfigError, JobConfig, dump_toml, load_config
from config.job_config import Parallelism
from data.loader import Batch, BatchLoader
from data.sources import Source, build_sources
from data.tokenizer import Tokenizer, load_tokenizer
from metrics.flops import flops_per_token, matmul_parameters, peak_flops
from metrics.logger import MetricsLogger
from metrics.profiling import profiler
from metrics.sample import sample
from models import ModelSpec, TransformerArgs, find_model
from models.meta import build_on_meta
from optim.grad_norm import clip_grad_norm_
from optim.loss import IGNORED, cross_entropy_sum
from optim.optimizer import build_optimizer
from optim.schedule import lr_factor
from parallelisms.gradient_reduction import begin_microbatch
from parallelisms.materialize import materialize
from parallelisms.mixed_precision import mixed_precision_policy
from parallelisms.parallel_dims import ParallelDims
from parallelisms.parallelize import parallelize
from parallelisms.replicas import check_replicas
from parallelisms.support import check_support
from parallelisms.traffic import warn_of_traffic
from runtime import exit_codes
from runtime.compat import set_timeout
from runtime.control import RunControl
from runtime.distributed import init_distributed, set_seed, sum_over
from runtime.log import init_logging, logger

NOT_FINITE = "a gradient norm that is not finite"


@dataclass(frozen=True)
class Job:
    """What is asked for, with everything checked that can be wrong with it."""

    config: JobConfig
    """Resolved: what was absent and follows from the rest is in it."""
    spec: ModelSpec
    args: TransformerArgs
    tokenizer: Tokenizer
    train_source: Source
    held_out_source: Source | None
    global_batch_size: int
    total_steps: int
    """The horizon of the learning rate's schedule."""


@dataclass
class TrainState:
    step: int = 0
    tokens: int = 0
    """Tokens trained on, over all ranks."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "tokens": self.tokens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.tokens = state_dict["step"], state_dict["tokens"]


def resolve(config: JobConfig, world_size: int) -> Job:
    """Look up and open what the config names; raise ``ValueError`` before any process group."""
    spec, published_args = find_model(config.model.name, config.model.flavor)
    has_gpu = torch.cuda.is_available()
    degrees = check_support(config, published_args, world_size, has_gpu=has_gpu)
    tokenizer = load_tokenizer(config.data.tokenizer)
    # Multiples of 64 suit both tensor cores and any tensor parallel degree.
    vocab_size = config.model.vocab_size or -(-tokenizer.n_vocab // 64) * 64
    if vocab_size < tokenizer.n_vocab:
        raise ValueError(f"model.vocab_size: must be at least the tokenizer's {tokenizer.n_vocab}")
    train_source, held_out_source = build_sources(
        config.data, config.debug.seed, with_held_out=config.validation.enable
    )
    one_microbatch = config.training.local_batch_size * degrees.batch
    batch_size = config.training.global_batch_size or one_microbatch
    total_steps = config.lr_scheduler.total_steps or config.training.steps
    resolved = {
        "model": config.model.model_copy(update={"vocab_size": vocab_size}),
        "training": config.training.model_copy(update={"global_batch_size": batch_size}),
        "lr_scheduler": config.lr_scheduler.model_copy(update={"total_steps": total_steps}),
    }
    return Job(
        config=config.model_copy(update=resolved),
        spec=spec,
        args=replace(published_args, vocab_size=vocab_size, max_seq_len=config.training.seq_len),
        tokenizer=tokenizer,
        train_source=train_source,
        held_out_source=held_out_source,
        global_batch_size=batch_size,
        total_steps=total_steps,
    )


@record
def main(job: Job) -> int:
    """Train as ``job`` says; return the exit code."""
    # 1. Ranks: signals first, for they may come at any time
    config, training = job.config, job.config.training
    run_folder = Path(config.job.output_dir) / config.job.name
    control = RunControl(run_folder / "control")
    device = init_distributed(config.comm)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dims = ParallelDims.build(config.parallelism, world_size, device.type)
    set_seed(config.debug)
    control.begin(is_writer=rank == 0)
    if rank == 0:
        (run_folder / "config.toml").write_text(dump_toml(config))
    logger.info("ranks: %d on %s, %s", world_size, device.type, dims.degrees)

    # 2. Data: this rank's rows of every global batch
    build_loader = partial(
        BatchLoader,
        tokenizer=job.tokenizer,
        seq_len=training.seq_len,
        local_batch_size=training.local_batch_size,
        global_batch_size=job.global_batch_size,
        rank=dims.batch_mesh.get_local_rank(),
        degree=dims.batch_mesh.size(),
        document_mask=config.data.document_mask,
        prefetch=config.data.prefetch,
    )
    loader = build_loader(job.train_source)
    logger.info("data: %s, tokenizer %s", job.train_source.description, config.data.tokenizer)

    # 3. The model on the meta device: shapes only
    args = job.args
    model = build_on_meta(job.spec, args, getattr(torch, training.dtype))
    flops = flops_per_token(
        matmul_parameters(model),
        n_layers=args.n_layers,
        n_heads=args.n_heads,
        head_dim=args.head_dim,
        seq_len=training.seq_len,
    )
    n_parameters = sum(p.numel() for p in model.parameters())
    logger.info(
        "model: %s %s, %s parameters", config.model.name, config.model.flavor, f"{n_parameters:,}"
    )

    # 4. Shard it, then give it memory and weights
    mp_policy = mixed_precision_policy(training, device)
    parallelize(
        model,
        dims,
        facts=job.spec,
        parallelism=config.parallelism,
        activation_checkpoint=config.activation_checkpoint,
        compile=config.compile,
        mp_policy=mp_policy,
    )
    is_offloaded = config.parallelism.fsdp_cpu_offload
    materialize(model, device, seed=config.debug.seed, is_offloaded=is_offloaded)
    forward_backward = partial(run_model, model, device, config.parallelism)

    # 5. Optimizer; its learning rate is a function of the step
    optimizer = build_optimizer(model, config.optimizer)
    parameters = list(model.parameters())

    # 6. Checkpoint: resume from the newest that verifies
    state = TrainState()
    model_state = ModelState([model])
    checkpointer = Checkpointer(
        run_folder / "checkpoints",
        config.checkpoint,
        tensors={"model": model_state, "optimizer": OptimizerState([model], [optimizer])},
        values={"data": loader, "train": state},
    )
    resumed = checkpointer.load_latest()
    if resumed is not None:
        logger.info("resumed from step %d of %s", resumed, run_folder)
        if resumed >= training.steps:
            logger.info("nothing to do: training.steps is %d", training.steps)
    elif config.checkpoint.initial_load_path:
        checkpointer.load_initial(model_state)
        logger.info("weights from %s", config.checkpoint.initial_load_path)
    check_replicas(model, dims.weight_mesh)
    peak = peak_flops(device, config.metrics.peak_tflops)
    if peak is not None:
        warn_of_traffic(
            dims,
            config.parallelism,
            mp_policy,
            n_parameters=n_parameters,
            n_tokens=training.local_batch_size * training.seq_len,
            microbatches=loader.microbatches,
            flops_per_token=flops[0],
            peak_flops=peak,
        )

    # 7. What is seen
    held_out: list[Batch] = []
    if job.held_out_source is not None:
        count = config.validation.steps * loader.microbatches
        held_out = list(islice(build_loader(job.held_out_source), count))
    metrics = MetricsLogger(
        run_folder,
        config.metrics,
        is_writer=rank == 0,
        device=device,
        n_devices=world_size,
        flops_per_token=flops,
        peak_flops=peak,
        resumed=resumed,
    )

    def validate() -> None:
        with metrics.paused():
            loss = validation_loss(model, held_out, device, dims.batch_mesh)
            metrics.log_validation(state.step, loss)

    def save() -> None:
        with metrics.paused():
            folder = checkpointer.save(state.step)
            control.report("progress", str(state.step))
            logger.info("saved %s", folder)

    # 8. The loop
    gc.disable()  # Ranks that collect at different times wait for each other.
    stop: str | None = None
    if held_out and state.step == 0:
        validate()
    with profiler(run_folder / "traces", config.profiling, rank=rank) as finish_step:
        while state.step < training.steps and stop is None:
            state.step += 1
            begin = time.perf_counter()
            microbatches = list(islice(loader, loader.microbatches))
            data_wait = time.perf_counter() - begin
            # Fixed before the first backward: the loss is divided by the step's global count.
            n_tokens = sum_over(count_valid(microbatches), dims.batch_mesh)
            loss = forward_backward(microbatches, n_tokens)
            grad_norm = clip_grad_norm_(parameters, training.max_norm)
            lr = config.optimizer.lr * lr_factor(state.step, config.lr_scheduler, job.total_steps)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()

            state.tokens += int(n_tokens)
            metrics.count(int(n_tokens), data_wait)
            if metrics.is_due(state.step) or state.step == training.steps:
                global_loss = sum_over(loss, dims.batch_mesh).item()
                values = {"loss": global_loss, "grad_norm": grad_norm.item(), "lr": lr}
                metrics.log(state.step, training.steps, values)
            finish_step(state.step)
            if state.step % training.gc_freq == 0:
                gc.collect(1)
            if state.step - (resumed or 0) == 1:
                set_timeout(timedelta(seconds=config.comm.train_timeout_seconds))

            stop = control.agreed_stop()
            is_last = state.step == training.steps or stop is not None
            is_due = is_last or state.step % config.checkpoint.interval == 0
            # One value that is not finite spreads to all weights: those must not replace good ones.
            if (is_due or metrics.is_due(state.step)) and not grad_norm.isfinite():
                stop = NOT_FINITE
                break
            if held_out and stop is None and (is_last or state.step % config.validation.freq == 0):
                validate()
            if config.checkpoint.enable and is_due:
                save()

    # 9. The end
    metrics.close()
    if stop is None and config.validation.sample_tokens > 0:
        logger.info("the model writes:\n%s", written_text(model, job))
    log_whereabouts(config, run_folder, state.step, stop)
    control.report("outcome", "done" if stop is None else f"stopped {stop}")
    dist.barrier()
    dist.destroy_process_group()
    if stop == NOT_FINITE:
        return exit_codes.DO_NOT_REQUEUE
    is_preempted = stop is not None and stop.startswith("SIG") and config.checkpoint.enable
    return exit_codes.PREEMPTED if is_preempted else exit_codes.DONE


def run_model(
    model: nn.Module,
    device: torch.device,
    parallelism: Parallelism,
    microbatches: list[Batch],
    n_tokens: torch.Tensor,
) -> torch.Tensor:
    """Forward and backward of each microbatch; this rank's part of the step's loss."""
    total = torch.zeros((), device=device)
    for batch in microbatches:
        begin_microbatch(model, parallelism, is_last=batch is microbatches[-1])
        loss = loss_sum(model, batch, device) / n_tokens.to(device)
        loss.backward()
        total = total + loss.detach()
    return total


def loss_sum(model: nn.Module, batch: Batch, device: torch.device) -> torch.Tensor:
    logits = model(*(t if t is None else t.to(device, non_blocking=True) for t in batch.inputs))
    return cross_entropy_sum(logits, batch.labels.to(device, non_blocking=True))


def count_valid(microbatches: list[Batch]) -> torch.Tensor:
    """Labels of this rank that count, as an int64 on the CPU."""
    return torch.stack([(batch.labels != IGNORED).sum() for batch in microbatches]).sum()


@torch.no_grad()
def validation_loss(
    model: nn.Module, batches: list[Batch], device: torch.device, batch_mesh: DeviceMesh
) -> float:
    """Cross entropy in nats per held-out token, over all ranks."""
    loss = torch.stack([loss_sum(model, batch, device) for batch in batches]).sum()
    n_tokens = sum_over(count_valid(batches), batch_mesh)
    return sum_over(loss, batch_mesh).item() / int(n_tokens)


def written_text(model: nn.Module, job: Job) -> str:
    """The prompt and what the model makes of it. A collective under sharding."""
    config, tokenizer = job.config, job.tokenizer
    prompt = [tokenizer.bos_id, *tokenizer.encode(config.validation.sample_prompt).tolist()]
    tokens = sample(
        model,
        prompt,
        count=config.validation.sample_tokens,
        n_ids=tokenizer.n_vocab,
        seq_len=config.training.seq_len,
        seed=config.debug.seed,
    )
    return config.validation.sample_prompt + tokenizer.decode(tokens)


def log_whereabouts(config: JobConfig, run_folder: Path, step: int, stop: str | None) -> None:
    what = f"done: {step} steps" if stop is None else f"stopped by {stop} after step {step}"
    hint = "more --training.steps extend the run" if stop is None else "the same command resumes"
    if stop == NOT_FINITE:
        hint = "not saved, and the same command would come here again"
    logger.info(f"{what}; {hint}" if config.checkpoint.enable else f"{what}; nothing was saved")
    logger.info("log of all steps: %s", run_folder / "metrics.jsonl")
    if config.checkpoint.enable:
        logger.info("checkpoints: %s", run_folder / "checkpoints")
    if config.metrics.enable_tensorboard:
        logger.info("curves: tensorboard --logdir %s", run_folder / "tensorboard")


def start(arguments: list[str]) -> int:
    """Train the config that ``arguments`` name; its mistakes are told without a traceback."""
    try:
        config = load_config(Path(arguments[0]), arguments[1:])
        job = resolve(config, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    except ValueError as error:
        return refuse(error)
    try:
        return main(job) or exit_codes.DONE
    except ConfigError as error:
        return refuse(error)


def refuse(error: ValueError) -> int:
    """Tell what is wrong with the config, once, and return the exit code for it."""
    # The first rank to end makes torchrun end the others, before they print: tell it instead.
    if (told := os.environ.get("TORCHELASTIC_ERROR_FILE")) is not None:
        Path(told).write_text(json.dumps({"message": str(error)}))
    else:
        print(error, file=sys.stderr)
    return exit_codes.BAD_CONFIG


if __name__ == "__main__":
    init_logging()
    sys.exit(start(sys.argv[1:]))
