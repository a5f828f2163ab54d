"""The loop over steps: when a step may start, what follows it, and how a run ends."""

import gc
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch.profiler import record_function

from checkpoint.checkpointer import Checkpointer
from config import ConfigError
from data.step_batches import DataError, StepBatch, StepBatches, StepSync
from launcher.post_mortem import RankHeartbeat
from metrics.memory_report import explained_out_of_memory
from metrics.profiling import StepProfiler
from metrics.source_fractions import source_fractions
from optim.spikes import LossSpikeDetector
from parallelisms.replicas import check_replicas
from resume import TrainState, attempt_of
from run_log import RunLog
from run_spec import RunSpec
from runtime import exit_codes
from runtime.compat import set_timeout
from runtime.control import RunControl, StopRequested
from runtime.exit_codes import StopReason, stopped_by
from runtime.log import OF_LINES, logger, show_progress
from runtime.object_collectives import run_on_rank0
from train_step import StepResult, TrainStep
from validation import Sample, Sampler, Validator


@dataclass
class TrainLoop:
    """The loop over steps. Every rank takes the same branches in the same order."""

    run: RunSpec
    control: RunControl
    _: KW_ONLY
    batches: StepBatches
    train_step: TrainStep
    spikes: LossSpikeDetector
    state: TrainState
    checkpointer: Checkpointer
    log: RunLog
    validator: Validator | None
    sampler: Sampler | None
    heartbeat: RankHeartbeat
    profiler: StepProfiler
    samples: list[Sample] = field(default_factory=list)
    """Of the latest validation."""

    def run_steps(self) -> StopReason:
        """Train until a reason to stop, and close the loader. Collective."""
        run, model, optimizer = self.run, self.train_step.model, self.train_step.optimizer
        with (
            closing(self.batches.loader),
            explained_out_of_memory(model.module, optimizer, run.config, run.allows),
        ):
            try:
                return self._run_steps()
            except DataError as error:
                # Else the next start, which may wait for somebody, would repeat steps.
                is_finite = not self.train_step.nonfinite.should_stop()
                self.save_newest_step(is_worth_saving=is_finite)
                raise error.cause from None

    def _run_steps(self) -> StopReason:
        state, config, checkpointer = self.state, self.run.config, self.checkpointer
        first_step = state.step + 1
        if first_step == 1 or state.lacks_validation:
            self.validate(is_last=state.step == config.training.steps)
        self.show("first step" + ", compiling" * config.compile.enable)
        while state.step < config.training.steps:
            batch, sync = self.next_batch()
            if sync.stop is not None:
                # The batch was taken, but not committed: a resumed run takes it again.
                return self.stopped()
            if batch.is_end_of_data:
                return self.end_of_data()
            result = self.train(batch)
            # The host waits for the device on steps that are logged or saved; with a ledger or
            # spike detection, on all.
            save_is_due = checkpointer.is_due(state.step)
            is_synced = save_is_due or self.log.is_due(state.step)
            must_stop = is_synced and self.train_step.nonfinite.should_stop()
            metrics = partial(self.metrics, sync, result)
            values = self.log.step(state.step, batch, result, metrics=metrics)
            # Before must_stop, because a rollback undoes nonfinite steps too.
            is_spike = self.is_spike(values)
            if is_spike and self.spikes.exhausted:
                return exit_codes.SPIKES
            if is_spike and self.roll_back():
                continue
            if must_stop:
                return exit_codes.NOT_FINITE
            if state.step == first_step:
                # It compiles and connects; later steps must not take as long.
                set_timeout(timedelta(seconds=config.comm.train_timeout_seconds))
            self.show()
            self.periodic_work()
            if save_is_due:
                self.save()
            # Last, because the save above may have been the one that was overdue.
            if checkpointer.is_overdue(state.step):
                return exit_codes.NOT_SAVED
        return self.stopped_in_validation() or exit_codes.FINISHED

    def next_batch(self) -> tuple[StepBatch, StepSync]:
        """Return the next step's batch, and what ranks agreed on before that step. Collective."""
        step = self.state.step + 1
        with self.log.metrics.exclude_from_throughput(waits=False):
            self.profiler.begin_step(step)
        # May this step start? All ranks read the answer off the same all-reduce.
        batch, sync = self.batches.next(step, is_writing=self.checkpointer.is_writing)
        self.profiler.request(sync.wanted)
        if sync.n_writing == 0:
            # Commit an async save once all ranks have written it.
            self.checkpointer.finish()
        return batch, sync

    def train(self, batch: StepBatch) -> StepResult:
        """Make the next step, and count its batch as trained on. Collective."""
        self.state.step += 1
        self.heartbeat.step = self.state.step
        result = self.train_step(self.state.step, batch)
        # After the update, so that a checkpoint never counts a batch that was not trained on.
        self.batches.loader.commit(batch.taken)
        self.state.tokens += batch.n_tokens
        return result

    def stopped_in_validation(self) -> StopReason | None:
        is_stopped = self.state.lacks_validation and self.control.stop is not None
        return self.stopped() if is_stopped else None

    def stopped(self) -> StopReason:
        """The reason of the signal or stop file that this run received."""
        assert self.control.stop is not None
        has_checkpoints = self.run.config.checkpoint.enable
        return stopped_by(self.control.stop, has_checkpoints=has_checkpoints)

    def show(self, activity: str = "") -> None:
        """Show the newest step, and what is done besides training, on the console's live line."""
        show_progress(self.state.step, self.run.config.training.steps, activity)

    @contextmanager
    def activity(self, name: str) -> Iterator[None]:
        """Context of work besides training: shown by ``name``, and no part of throughput."""
        self.show(name)
        with self.log.metrics.exclude_from_throughput():
            yield
        self.show()

    def is_spike(self, values: dict[str, float] | None) -> bool:
        """True if this step's logged loss is a spike. Collective where spikes are looked for."""
        if values is None or not self.spikes.enabled:
            return False
        # Rank 0's values decide, because those of other ranks may differ in the last bit.
        return self.spikes.is_spike(self.state.step, **run_on_rank0(values.copy))

    def metrics(self, sync: StepSync, result: StepResult) -> dict[str, float]:
        """Return the metrics of this step besides loss and gradient norm. Collective."""
        batch_mesh = self.train_step.model.dims.batch_mesh
        sources = source_fractions(self.batches.loader.consumed(), self.run.sources, batch_mesh)
        return {
            "lr": result.lr,
            "tokens": self.state.tokens,
            **self.train_step.metrics(),
            **sources,
            "bad_records": sync.n_bad_records,
        }

    def periodic_work(self) -> None:
        """Do the work that is due only every so many steps, except saving. Collective."""
        step, config, model = self.state.step, self.run.config, self.train_step.model
        is_writing = self.profiler.is_writing(step)
        with self.log.profiling(is_writing=is_writing):
            self.profiler.end_step(step)
        if step % config.training.gc_freq == 0:
            with record_function("gc"):
                gc.collect(1)
        check_freq = config.numerics.replica_check_freq
        if check_freq and step % check_freq == 0:
            optimizer = self.train_step.optimizer
            with record_function("replica check"):
                check_replicas(model.module, model.dims.weight_mesh, optimizer, tied=model.tied)
        is_last = step == config.training.steps
        if is_last or step % config.validation.freq == 0:
            self.validate(is_last=is_last)

    def validate(self, *, is_last: bool = False) -> None:
        if self.validator is None:
            return
        try:
            with self.activity("validation"), record_function("validation"):
                losses = self.validator.evaluate(self.train_step.runner)
                bits_per_nat = self.validator.bits_per_nat
                self.log.metrics.log_validation(self.state.step, losses, bits_per_nat=bits_per_nat)
            self.sample(is_last=is_last)
            self.state.lacks_validation = False
        except StopRequested:
            self.state.lacks_validation = True
            logger.info("validation: stopped; the next start repeats it")

    def sample(self, *, is_last: bool) -> None:
        if self.sampler is not None:
            with self.activity("sampling"), record_function("sampling"):
                self.samples = self.sampler.sample(self.train_step.runner, self.state.step)
                self.log.samples(self.samples, is_last=is_last)

    def save(self, *, wait: bool = False) -> None:
        with (
            self.activity("saving a checkpoint"),
            record_function("checkpoint"),
            self.log.save(wait=wait),
        ):
            self.checkpointer.save(self.state.step, wait=wait)

    def save_newest_step(self, *, is_worth_saving: bool) -> bool:
        """Commit a pending save, and save the newest step; return False if that fails. Collective.

        Without checkpoints, or if it is not worth saving, the step is not saved.
        """
        # The weights of a pending save were finite before it began, whatever the reason to stop.
        self.checkpointer.finish()
        if not (self.run.config.checkpoint.enable and is_worth_saving):
            return True
        if self.checkpointer.newest_step != self.state.step:
            self.save(wait=True)
        return self.checkpointer.newest_step == self.state.step

    def roll_back(self) -> bool:
        """Load the newest checkpoint, if any. Data continue: the spike's batches are skipped."""
        with self.log.metrics.exclude_from_throughput():
            self.checkpointer.finish()
            spiked = self.state.step
            if self.checkpointer.load_latest(skip={"data"}) is None:
                logger.warning("rollback: there is no checkpoint to load")
                return False
            self.train_step.reset_graphs()
            self.spikes.rollbacks += 1
            logger.info("rollback: from step %d to step %d", spiked, self.state.step)
            dims = self.train_step.model.dims
            self.log.new_attempt(attempt_of(self.checkpointer, self.run, dims, data_after=spiked))
            return True

    def end_of_data(self) -> StopReason:
        if self.state.tokens == 0:
            raise ConfigError(["data: no document has text"])
        if self.state.step % self.run.config.validation.freq:
            self.validate(is_last=True)
        return self.stopped_in_validation() or exit_codes.DATA_ENDED

    def finish(self, stop: StopReason) -> int:
        """Save, sample, report the outcome, and return the exit code. Collective."""
        step, checkpointer = self.state.step, self.checkpointer
        if self.train_step.nonfinite.should_stop():
            stop = exit_codes.NOT_FINITE
        if not self.save_newest_step(is_worth_saving=stop.is_worth_saving):
            stop = exit_codes.NOT_SAVED
        if stop in (exit_codes.FINISHED, exit_codes.DATA_ENDED):
            if step not in (sample.step for sample in self.samples):
                with suppress(StopRequested):
                    self.sample(is_last=True)
            for sample in self.samples:
                logger.info("sample:\n%s", sample.prompt + sample.text, extra=OF_LINES)
                self.log.metrics.text("sample", sample.prompt + sample.text)
        self.show("ending")
        self.log.close()
        log_outcome(self.run, step, stop, has_checkpoints=checkpointer.newest_step > 0)
        if stop.code == exit_codes.FAILED:
            self.heartbeat.failure = f"stopped by {stop.reason}"
        if stop != exit_codes.NOT_SAVED:
            self.control.end(stop.outcome)
        # NCCL waits for graphs that have its collectives.
        self.train_step.reset_graphs()
        dist.barrier()
        dist.destroy_process_group()
        checkpointer.close()
        return stop.code


def log_outcome(run: RunSpec, step: int, stop: StopReason, *, has_checkpoints: bool) -> None:
    """Log why the run ended, and where its files are."""
    is_worthless = run.config.checkpoint.enable and not stop.is_worth_saving
    shows_hint = has_checkpoints or is_worthless
    what = f"stopped by {stop.reason} after step {step}" if stop.reason else f"done: {step} steps"
    logger.info("%s; %s", what, stop.hint if shows_hint else "nothing was saved")
    logger.info("metrics: %s", run.folder / "metrics.jsonl")
    if has_checkpoints:
        logger.info("checkpoints: %s", run.folder / "checkpoints")
