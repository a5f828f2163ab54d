"""Records of a run and its steps: configuration, metrics, samples, the ledger, slow ranks."""

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

import torch.distributed as dist

from build_model import ShardedModel
from config import dump_toml
from data.step_batches import StepBatch
from metrics.alarms import AlarmsFile
from metrics.divergence import Divergence
from metrics.history import ROLLED_BACK
from metrics.ledger import AttemptHeader, Ledger
from metrics.logger import MetricsLogger
from metrics.metrics_file import read_metrics
from metrics.planned_step import FIRST_STEPS, start_plan
from metrics.samples_file import SamplesFile
from metrics.slow_steps import Notices, SlowSteps
from metrics.stragglers import Stragglers
from metrics.tracker import TrackedRun
from metrics.trackers import Trackers, run_id, tracker_classes
from run_spec import RunSpec
from runtime.distributed import sum_in_order
from runtime.filesystem import atomic_write_text
from runtime.log import logger
from runtime.run_folder import WriteAlarm
from runtime.torch_device import device_name
from train_step import StepResult
from validation import Sample

# Of a sample on the console; samples.jsonl has all.
SHOWN_CHARACTERS = 80


class RunLog:
    """Writes what a run logs. Waits for the device only on steps whose values are read."""

    def __init__(
        self,
        run: RunSpec,
        model: ShardedModel,
        attempt: AttemptHeader,
        resumed_step: int | None,
        *,
        alarms: AlarmsFile | None,
        detects_spikes: bool,
    ) -> None:
        """``resumed_step``: of the checkpoint loaded, if any. Collective.

        ``alarms``: rank 0's, which this closes. ``detects_spikes``: every step's values are needed.
        """
        config, self._run = run.config.metrics, run
        self._is_writer, self._alarm = dist.get_rank() == 0, WriteAlarm()
        self._first_step = (resumed_step or 0) + 1
        if self._first_step <= run.config.training.steps:  # Else no step has its keys.
            self._write_config()
        self._data_mesh = model.dims.data_mesh
        self._reads_every_step = config.enable_ledger or detects_spikes
        self.metrics = MetricsLogger(
            run.folder,
            config,
            is_writer=self._is_writer,
            device=model.device,
            n_devices=dist.get_world_size(),
            flops_per_token=model.flops_per_token,
            peak_flops=model.peak_flops,
            resumed_step=resumed_step,
            trackers=self._start_trackers(resumed_step) if self._is_writer else None,
        )
        self._samples = None
        if self._is_writer and run.config.validation.sample_tokens > 0:
            self._samples = SamplesFile(run.folder / "samples.jsonl", resumed_step)
        self._alarms, self._divergence, self._notices = alarms, Divergence(), Notices()
        if alarms is not None:
            alarms.end_step(resumed_step or 0)
        # A loss may have risen above what was the best before this start.
        if self._is_writer and resumed_step is not None:
            self._divergence.add_history(read_metrics(run.folder / "metrics.jsonl")[0])
        # The plan is of a step with the full batch.
        ramp_steps = sum(steps for steps, _ in run.ramp)
        self._plan, self._last_unplanned = None, max(resumed_step or 0, ramp_steps) + FIRST_STEPS
        if self._is_writer and model.device.type == "cuda":
            self._plan = start_plan(
                dump_toml(run.config),
                world_size=dist.get_world_size(),
                device_name=device_name(model.device),
            )
        self._slow_steps = SlowSteps(
            model.device, gc_freq=run.config.training.gc_freq, is_writer=self._is_writer,
            is_resumed=resumed_step is not None,
        )  # fmt: skip
        self._ledger = Ledger(run.folder / "ledger", attempt) if config.enable_ledger else None
        self._stragglers = None
        if config.straggler_window > 0:
            blocks = model.spec.blocks(model.module).values()
            window = config.straggler_window
            self._stragglers = Stragglers(blocks, window=window, device=model.device)

    def _start_trackers(self, resumed_step: int | None) -> Trackers:
        config, folder = self._run.config, self._run.folder
        tracked = TrackedRun(
            id=run_id(folder),
            name=config.job.name,
            project=config.metrics.project,
            folder=folder,
            config=config.model_dump(mode="json"),
            resumed_step=resumed_step,
        )
        return Trackers(tracker_classes(config.metrics.trackers), tracked)

    def is_due(self, step: int) -> bool:
        """True if the metrics of ``step`` are logged: by ``metrics.log_freq``, and the last."""
        return step == self._run.config.training.steps or self.metrics.is_due(step)

    def step(
        self,
        step: int,
        batch: StepBatch,
        result: StepResult,
        *,
        metrics: Callable[[], dict[str, float]],
    ) -> dict[str, float] | None:
        """Record a step; return its global loss and gradient norm if they were read. Collective.

        ``metrics``: returns the other metrics of the step; called if it is logged.
        """
        if self._alarms is not None:
            self._alarms.end_step(step)
        self.metrics.end_step(step, batch.n_tokens, batch.n_sequences, batch.data_wait)
        self._slow_steps.end_step()
        slowest = {} if self._stragglers is None else self._stragglers.end_step()
        is_due = self.is_due(step)
        is_read = is_due or self._reads_every_step
        values = self._read(step, batch, result) if is_read else {}
        if is_due:
            steps_left = self._run.steps_left(step)
            window = self.metrics.window()
            # Not those of the latest size: a leak grows with steps.
            left = self._run.config.training.steps - step
            gpus = self._slow_steps.end_window(step, window, steps_left=left)
            record = values | slowest | gpus | metrics()
            measured = self.metrics.log(step, steps_left, record)
            if step - window.steps >= self._last_unplanned:
                self._compare_with_plan(measured)
            if self._is_writer:
                self._watch_loss(step, values["loss"])
        elif step == self._first_step:
            self.metrics.exclude_first_step()
        if result.layers:
            # After the step's own line, which readers take for the step's beginning.
            self.metrics.write({"step": step} | result.layers)
        return values or None

    def _watch_loss(self, step: int, loss: float) -> None:
        text = self._divergence.add(step, loss)
        if self._notices.is_new("divergence", bool(text)):
            logger.error("ALARM: %s", text)

    def _compare_with_plan(self, measured: dict[str, float]) -> None:
        """Log the plan beside what was measured, once, if the plan is done."""
        if self._plan is not None and (text := self._plan.text(measured)) is not None:
            logger.info("plan: %s", text)
            self._plan.close()
            self._plan = None

    def _read(self, step: int, batch: StepBatch, result: StepResult) -> dict[str, float]:
        """Wait for the step's global loss and gradient norm, and write the ledger. Collective."""
        loss = sum_in_order(result.losses, self._data_mesh).item()
        values = {"loss": loss, "grad_norm": result.grad_norm.item()}
        if self._ledger is not None:
            self._ledger.log(step, batch.taken, **values, n_empty_rows=batch.n_empty_rows)
        return values

    def samples(self, samples: list[Sample], *, is_last: bool) -> None:
        """Write samples to ``samples.jsonl``, and show the beginning of each on one line.

        ``is_last``: the run ends with them, and then shows them whole.
        """
        for sample in samples:
            text = sample.prompt + sample.text
            shown = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
            if not is_last:
                logger.info("step %5d  sample: %s", sample.step, shown)
            if self._samples is not None:
                self._samples.write(asdict(sample))

    @contextmanager
    def profiling(self, *, is_writing: bool) -> Iterator[None]:
        """Context in which the profiler ends a step, which is no part of throughput.

        ``is_writing``: it writes files, and leaves many objects, whose collection takes long.
        """
        with (
            self.metrics.exclude_from_throughput(waits=is_writing),
            self._slow_steps.without_gc(),
        ):
            yield
            if is_writing:
                gc.collect(1)

    def new_attempt(self, attempt: AttemptHeader) -> None:
        """Record a rollback: another attempt in the ledger, and which metrics and samples it undid.

        The undone lines of metrics stay, because they show the spike.
        """
        undone = {"step": attempt.resumed_from, ROLLED_BACK: attempt.data_after}
        self.metrics.write(undone)
        if self._ledger is not None:
            self._ledger.begin(attempt)
        if self._samples is not None:
            self._samples.close()
            self._samples = SamplesFile(self._run.folder / "samples.jsonl", attempt.resumed_from)

    @contextmanager
    def save(self, *, wait: bool) -> Iterator[None]:
        """Context of a save: first makes the ledger durable, because the checkpoint counts on it.

        ``wait``: it is the last one, and no steps wait for it.
        """
        begin = time.perf_counter()
        if not os.path.exists(self._run.folder / "config.toml"):
            self._write_config()
        if self._ledger is not None:
            self._ledger.sync()
        yield
        if not wait:
            self._slow_steps.end_save(time.perf_counter() - begin)

    def _write_config(self) -> None:
        path = self._run.folder / "config.toml"
        if self._is_writer:
            with self._alarm.of(path):
                atomic_write_text(path, dump_toml(self._run.config))

    def close(self) -> None:
        self.metrics.close()
        for file in (self._ledger, self._samples, self._alarms, self._plan):
            if file is not None:
                file.close()
        self._slow_steps.close()
