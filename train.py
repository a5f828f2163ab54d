"""Pretrain a model: ``torchrun --nproc_per_node=N train.py CONFIG.toml [--section.key value ...]``

Reads top to bottom: what is asked for, ranks, data, the model on the meta device, sharding,
weights, optimizer, checkpoint, the loop. ``./run_train.sh`` starts it.
"""

# ruff: noqa: E402
from runtime.imports import begin_imports, end_imports

begin_imports()

import gc
import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from checkpoint.checkpointer import Checkpointer
from checkpoint.states import ModelState, OptimizerState
from config import ConfigError, JobConfig, dump_toml, load_config
from data.feed import Feed, StepData
from data.loader import BatchLoader
from forward_backward import build_runner
from job import Job, resolve
from metrics.data_shares import data_shares
from metrics.flops import flops_per_token, peak_flops
from metrics.ledger import Ledger
from metrics.logger import MetricsLogger
from metrics.profiling import profiler
from metrics.stragglers import Stragglers
from models.meta import build_on_meta
from optim.expert_balance import ExpertBalance
from optim.grad_norm import clip_grad_norm_, local_norms
from optim.muon import hidden_matrices
from optim.nonfinite import NonfiniteGuard
from optim.optimizer import build_optimizer
from optim.schedule import lr_factor
from optim.spikes import SpikeGuard
from parallelisms.elastic import GradientTree, apply_elastic
from parallelisms.materialize import materialize
from parallelisms.mixed_precision import mixed_precision_policy
from parallelisms.parallel_dims import ParallelDims
from parallelisms.parallelize import parallelize
from parallelisms.replicas import check_replicas
from parallelisms.shared_parameters import shared_names
from parallelisms.traffic import warn_of_traffic
from resume import TrainState, attempt_of, check_resume, facts_of, restore
from runtime import exit_codes
from runtime.attention import attention_order
from runtime.compat import set_timeout
from runtime.control import RunControl
from runtime.distributed import init_distributed, set_seed, sum_in_order
from runtime.exit_codes import Ending, stopped_by
from runtime.kernels import choose_kernels
from runtime.log import init_logging, logger
from runtime.machine import keep_freed_memory
from runtime.post_mortem import Witness
from runtime.release import about_torch, is_untested
from runtime.together import on_first
from validation import HeldOut, written_text

end_imports()


@record
def main(job: Job, witness: Witness) -> int:
    """Train as ``job`` says; return the exit code. ``witness`` is told the step."""
    # 1. Ranks: signals first, for they may come at any time
    config, training = job.config, job.config.training
    run_folder = config.job.folder
    control = RunControl(run_folder / "control")
    device = init_distributed(config.comm)
    control.hold()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dims = ParallelDims.build(config.parallelism, world_size, device.type)
    set_seed(config.debug)
    if device.type == "cpu":
        keep_freed_memory()
    logger.info("ranks: %d on %s, %s", world_size, device.type, dims.degrees)
    if is_untested():
        logger.warning("this release is newer than those that were tested: %s", about_torch())

    # 2. Data: this rank's rows of every global batch
    build_loader = partial(
        BatchLoader,
        tokenizer=job.tokenizer,
        vocab_size=job.args.vocab_size,
        seq_len=training.seq_len,
        local_batch_size=job.microbatch_size,
        global_batch_size=job.global_batch_size,
        rank=dims.batch_mesh.get_local_rank(),
        degree=dims.degrees.batch,
        document_mask=config.data.document_mask,
        prefetch=config.data.prefetch,
        pin_memory=device.type == "cuda",
        packing=config.data.packing,
    )
    loader = build_loader(job.train)
    feed = Feed(
        loader,
        control,
        batch_size=job.batch_size,
        global_batch_size=job.global_batch_size,
        n_readers=world_size // dims.degrees.batch,
        max_bad_records=config.data.max_bad_records,
    )
    logger.info("data: %s, tokenizer %s", job.train.description, config.data.tokenizer)

    # 3. The model on the meta device: shapes only
    args = job.args
    model = build_on_meta(job.spec, args, getattr(torch, training.dtype))
    flops = flops_per_token(
        model,
        n_attentions=len(job.spec.attentions(model)),
        n_heads=args.n_heads,
        head_dim=args.head_dim,
        seq_len=training.seq_len,
        delta_nets=job.spec.delta_nets(model),
    )
    fqns, tied = [fqn for fqn, _ in model.named_parameters()], shared_names(model)
    has_experts = bool(job.spec.moes(model))
    n_parameters = sum(p.numel() for p in model.parameters())
    logger.info(
        "model: %s %s, %s parameters", config.model.name, config.model.flavor, f"{n_parameters:,}"
    )

    # 4. Shard it, then give it memory and weights
    mp_policy = mixed_precision_policy(training, device)
    heads = args.n_heads, args.n_kv_heads
    choose_kernels(
        device,
        attentions=job.spec.attentions(model),
        moes=job.spec.moes(model),
        delta_nets=job.spec.delta_nets(model),
        dtype=mp_policy.param_dtype,
        heads=heads,
        head_dim=args.head_dim,
        wants_flex_attention=job.wants_flex_attention,
        n_ranks=dims.degrees.tp * dims.degrees.cp,
    )
    stages = parallelize(
        model,
        dims,
        facts=job.spec,
        parallelism=config.parallelism,
        activation_checkpoint=config.activation_checkpoint,
        compile=config.compile,
        float8=config.float8,
        mp_policy=mp_policy,
    )
    is_elastic = config.debug.is_elastic
    if is_elastic:
        apply_elastic(model)
    is_offloaded = config.parallelism.fsdp_cpu_offload
    materialize(model, device, seed=config.debug.seed, is_offloaded=is_offloaded)
    parameters = list(model.parameters())
    tree = GradientTree(parameters, mp_policy.reduce_dtype) if is_elastic else None
    runner = build_runner(
        model,
        stages,
        dims,
        parallelism=config.parallelism,
        compile=config.compile,
        mp_policy=mp_policy,
        device=device,
        tied=tied,
        tree=tree,
    )

    peak = peak_flops(device, config.metrics.peak_tflops)
    if peak is not None and dims.degrees.pp == 1 and not has_experts:
        warn_of_traffic(
            model,
            dims,
            config.parallelism,
            mp_policy,
            n_tokens=training.local_batch_size * training.seq_len // dims.degrees.cp,
            microbatches=loader.microbatches,
            flops_per_token=flops[0],
            peak_flops=peak,
        )

    # 5. Optimizer; its learning rate is a function of the step
    optimizer = build_optimizer(
        model,
        config.optimizer,
        matrices=hidden_matrices(job.spec.blocks(model), job.spec.moes(model)),
        weight_mesh=dims.weight_mesh,
        is_elastic=is_elastic,
    )
    guard = NonfiniteGuard(
        optimizer,
        dict(model.named_parameters()),
        fqns=fqns,
        weight_mesh=dims.weight_mesh,
        config=config.numerics,
    )
    spikes = SpikeGuard(config.numerics)
    moes, rate = job.spec.moes(model), config.experts.balance_bias_rate
    balance = ExpertBalance(moes, dims.data_mesh, rate=rate, device=device)

    # 6. Checkpoint: resume from the newest that verifies
    state = TrainState()
    model_state = ModelState(model)
    checkpointer = Checkpointer(
        run_folder / "checkpoints",
        config.checkpoint,
        tensors={"model": model_state, "optimizer": OptimizerState(model, optimizer)},
        values={"data": loader, "train": state, "nonfinite": guard, "spikes": spikes},
        facts=facts_of(job),
        check=partial(check_resume, job),
        tell=lambda step: control.report("progress", str(step)),
    )
    resumed = restore(job, checkpointer, model_state)
    control.forget()
    if rank == 0:
        # Only now: a start that is refused changes nothing of the run.
        (run_folder / "config.toml").write_text(dump_toml(config))
    logger.info(
        "replicas agree: %s", check_replicas(model, dims.weight_mesh, tied=tied) or "there are none"
    )

    # 7. What watches the run: held-out text, metrics, ledger, slow ranks
    loader.start()
    held_out = HeldOut(job, build_loader, dims, control) if job.held_out else None
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
    ledger = None
    if config.metrics.enable_ledger:
        ledger = Ledger(run_folder / "ledger", attempt_of(checkpointer, job, dims))
    stragglers = None
    if config.metrics.straggler_window > 0:
        blocks, window = job.spec.blocks(model).values(), config.metrics.straggler_window
        stragglers = Stragglers(blocks, window=window, device=device)

    def validate() -> None:
        if held_out is not None:
            with metrics.paused():
                losses = held_out.losses(runner)
                metrics.log_validation(state.step, losses, bits_per_nat=held_out.bits_per_nat)

    def save(*, wait: bool = False) -> None:
        with metrics.paused():
            if ledger is not None:
                ledger.sync()
            checkpointer.save(state.step, wait=wait)

    def roll_back() -> bool:
        """Go back to the newest checkpoint, if any. Data go on: those of the spike are left out."""
        with metrics.paused():
            checkpointer.finish()
            spiked = state.step
            if checkpointer.load_latest(leave={"data"}) is None:
                logger.warning("no checkpoint to go back to")
                return False
            spikes.rollbacks += 1
            logger.info("went back from step %d to step %d", spiked, state.step)
            if ledger is not None:
                ledger.begin(attempt_of(checkpointer, job, dims, data_after=spiked))
            return True

    # 8. The loop
    def update(data: StepData) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Make a step; return this rank's losses, the gradient norm and the learning rate."""
        balance.begin_step(data.n_rows / job.global_batch_size)
        losses = runner.train(data.microbatches, data.n_tokens)
        norms = local_norms(parameters)
        grad_norm = clip_grad_norm_(
            parameters,
            training.max_norm,
            norms=norms,
            is_exact=is_elastic,
            pp_mesh=dims.pp_mesh,
            copies=runner.copies,
        )
        lr = config.optimizer.lr * lr_factor(state.step, config.lr_scheduler, job.total_steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        guard.check(state.step, loss=losses.sum(), norms=norms, grad_norm=grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        balance.finish_step(guard.found_inf)
        loader.commit(data.microbatches)
        state.tokens += data.n_tokens
        metrics.count(data.n_tokens, data.waited)
        return losses, grad_norm, lr

    def train(finish_step: Callable[[int], None]) -> Ending:
        reads_every_step = spikes.is_on or ledger is not None
        check_freq = config.numerics.replica_check_freq
        if state.step == 0:
            validate()
        while state.step < training.steps:
            data = feed.take(state.step + 1, is_writing=checkpointer.is_writing)
            if data.n_writing == 0:
                checkpointer.finish()
            if control.stop is not None:
                # These data were taken, but not committed: a resumed run takes them again.
                return stopped_by(control.stop, has_checkpoints=config.checkpoint.enable)
            if data.has_ended:
                if state.tokens == 0:
                    raise ConfigError(["data: no document has text"])
                if state.step % config.validation.freq:
                    validate()
                return exit_codes.DATA_ENDED
            state.step += 1
            witness.step = state.step
            losses, grad_norm, lr = update(data)

            # Look at the step: only some steps wait for the device
            is_last = state.step == training.steps
            is_saved = checkpointer.is_due(state.step)
            is_logged = is_last or metrics.is_due(state.step)
            slowest = {} if stragglers is None else stragglers.finish_step()
            is_over = (is_logged or is_saved) and guard.look()
            if is_logged or reads_every_step:
                loss = sum_in_order(losses, dims.data_mesh).item()
                values = {"loss": loss, "grad_norm": grad_norm.item()}
            if ledger is not None:
                ledger.log(state.step, data.microbatches, **values)
            if is_logged:
                seen = {"lr": lr, "tokens": state.tokens, **slowest}
                # A collective, so that a pipeline stage without experts must take part too.
                seen |= balance.look() if has_experts else {}
                seen |= data_shares(loader.consumed(), job.sources, dims.batch_mesh)
                seen |= {"skipped_steps": guard.skipped, "bad_records": data.n_bad_records}
                metrics.log(state.step, job.steps_left(state.step), values | seen)
            # Ranks must decide alike, though values may differ in the last bit: rank 0's count.
            if spikes.is_on and spikes.is_spike(state.step, **on_first(values.copy)):
                if spikes.is_over:
                    return exit_codes.SPIKES
                if roll_back():
                    continue
            if is_over:
                return exit_codes.NOT_FINITE

            # Work that is due only every so many steps
            with metrics.paused():
                finish_step(state.step)
            if state.step % training.gc_freq == 0:
                gc.collect(1)
            if state.step - (resumed or 0) == 1:
                set_timeout(timedelta(seconds=config.comm.train_timeout_seconds))
            if check_freq and state.step % check_freq == 0:
                check_replicas(model, dims.weight_mesh, optimizer, tied=tied)
            if is_last or state.step % config.validation.freq == 0:
                validate()
            if is_saved:
                save()
            if checkpointer.is_overdue(state.step):
                return exit_codes.NOT_SAVED
        return exit_codes.FINISHED

    gc.disable()  # Ranks that collect at different times wait for each other.
    with (
        attention_order(heads=heads, head_dim=args.head_dim),
        profiler(run_folder / "traces", config.profiling, rank=rank) as finish_step,
    ):
        ending = train(finish_step)

    # 9. The end
    if guard.look():
        ending = exit_codes.NOT_FINITE
    # A save that was begun is good, however the run ends.
    checkpointer.finish()
    if config.checkpoint.enable and ending.is_worth_saving:
        if checkpointer.newest != state.step:
            save(wait=True)
        if checkpointer.newest != state.step:
            ending = exit_codes.NOT_SAVED
    metrics.close()
    if ledger is not None:
        ledger.close()
    is_whole = ending in (exit_codes.FINISHED, exit_codes.DATA_ENDED)
    if is_whole and config.validation.sample_tokens > 0:
        logger.info("the model writes:\n%s", written_text(job, runner, dims))
    log_whereabouts(config, state.step, ending)
    if ending != exit_codes.NOT_SAVED:
        control.end(ending.outcome)
    dist.barrier()
    dist.destroy_process_group()
    checkpointer.close()
    return ending.code


def log_whereabouts(config: JobConfig, step: int, ending: Ending) -> None:
    what = f"stopped by {ending.reason} after {step}" if ending.reason else f"done: {step} steps"
    logger.info(f"{what}; {ending.hint if config.checkpoint.enable else 'nothing was saved'}")
    run_folder = config.job.folder
    logger.info("log of all steps: %s", run_folder / "metrics.jsonl")
    if config.checkpoint.enable:
        logger.info("checkpoints: %s", run_folder / "checkpoints")
    if config.metrics.enable_tensorboard:
        logger.info("curves: tensorboard --logdir %s", run_folder / "tensorboard")


def start(arguments: list[str]) -> int:
    """Train the config that ``arguments`` name; its mistakes are told without a traceback."""
    if not arguments:
        return refuse(ValueError(__doc__))
    with Witness(os.environ) as witness:
        try:
            config = load_config(Path(arguments[0]), arguments[1:])
            job = resolve(config, world_size=int(os.environ.get("WORLD_SIZE", "1")))
        except ValueError as error:
            return refuse(error)
        try:
            return main(job, witness) or exit_codes.DONE
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
