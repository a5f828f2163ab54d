"""Pretrain a model: ``torchrun --nproc_per_node=N train.py CONFIG.toml [--section.key value ...]``

Read ``main`` first, then ``TrainLoop`` in ``train_loop.py``. ``./run_train.sh`` starts it.
"""

# ruff: noqa: E402
from runtime.imports import begin_imports, end_imports

leave = begin_imports()

import gc
import json
import os
import sys
from contextlib import closing, suppress
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from build_model import build_model
from config import ConfigError, JobConfig, dump_toml, load_config
from kernels.sdpa import sdpa_backend_priority
from launcher.post_mortem import RankHeartbeat
from metrics.alarms import AlarmsFile
from metrics.profiling import StepProfiler
from optim.spikes import LossSpikeDetector
from parallelisms.parallel_dims import ParallelDims
from parallelisms.replicas import check_replicas
from resume import TrainState, attempt_of, build_checkpointer, restore
from run_log import RunLog
from run_spec import RunSpec, resolve
from run_summary import log_machine, log_plan
from runtime import exit_codes
from runtime.attempt import AttemptRecorder
from runtime.control import RunControl
from runtime.distributed import init_distributed, set_seed
from runtime.hub_paths import pin_names
from runtime.log import error_text, init_logging, logger, report, show_phase
from runtime.machine import disable_malloc_trim, raise_open_file_limit
from runtime.object_collectives import raise_if_unequal
from runtime.outside import exits_are_errors
from runtime.program import program_facts
from train_loop import TrainLoop
from train_step import TrainStep
from validation import Sampler, Validator

end_imports()


@record
@exits_are_errors
def main(run: RunSpec, heartbeat: RankHeartbeat) -> int:
    """Train, and return the exit code of the process (``runtime/exit_codes.py``)."""
    # --- Ranks: signal handlers before the process group, so that no early signal is lost
    config, control = run.config, RunControl(run.folder / "control")
    device = init_distributed(config.comm)
    raise_if_unequal(run.facts(device) | (program := program_facts()))
    control.acquire_lock()
    alarms = AlarmsFile(run.folder / "alarms.jsonl") if dist.get_rank() == 0 else None
    provenance = AttemptRecorder(run.folder, dump_toml(config), program)
    dims = ParallelDims.build(config.parallelism, dist.get_world_size(), device.type)
    set_seed(config.debug)
    if device.type == "cpu":
        disable_malloc_trim()
    log_machine(dims, config, device)

    # --- Data: this data-parallel rank's rows of every global batch
    loader = run.build_loader(run.training_data, dims, device)
    batches = run.build_batches(loader, control, dims)
    logger.info("data: %s, tokenizer %s", run.training_data.description, run.tokenizer_text)

    # --- Model: meta device, parallelisms, weights; then its optimizer
    model = build_model(run, dims, device)
    train_step = TrainStep(run, model)
    spikes = LossSpikeDetector(config.numerics)

    # --- Checkpoint: resume from the newest one that verifies
    state = TrainState()
    checkpointer = build_checkpointer(
        run, model, train_step, control, loader=loader, spikes=spikes, state=state
    )
    resumed_step = restore(run, checkpointer, model)
    provenance.finish(resumed_step)
    control.clear_previous_outcome()
    agreed = check_replicas(model.module, dims.weight_mesh, tied=model.tied)
    logger.info("replica check: %s", agreed or "skipped (no rank has a replica)")

    # --- Observers
    loader.start()
    validator = Validator(run, dims, device, control) if run.held_out else None
    sampler = Sampler(run, dims, control) if config.validation.sample_tokens > 0 else None
    attempt = attempt_of(checkpointer, run, dims)
    log_plan(run, model, train_step.optimizer, resumed_step, resumed_tokens=state.tokens)
    log = RunLog(run, model, attempt, resumed_step, alarms=alarms, detects_spikes=spikes.enabled)

    # --- Loop
    gc.disable()  # Ranks that collect at different times wait for each other.
    heads = run.model_args.n_heads, run.model_args.n_kv_heads
    with sdpa_backend_priority(heads=heads, head_dim=run.model_args.head_dim):
        with closing(StepProfiler(run.folder, config.profiling, rank=dist.get_rank())) as profiler:
            loop = TrainLoop(
                run, control, batches=batches, train_step=train_step, spikes=spikes, state=state,
                checkpointer=checkpointer, log=log, validator=validator, sampler=sampler,
                heartbeat=heartbeat, profiler=profiler,
            )  # fmt: skip
            stop = loop.run_steps()

        # --- Shutdown: last save, sample, outcome
        return loop.finish(stop)


def start(arguments: list[str]) -> int:
    """Train the config that ``arguments`` name; report its errors without a traceback."""
    if not arguments:
        return report_config_error(ConfigError((__doc__ or "").splitlines()))
    raise_open_file_limit()
    with RankHeartbeat(os.environ) as heartbeat:
        try:
            config = load_config(Path(arguments[0]), arguments[1:])
            show_phase("finding the data")
            run = resolve_or_raise_on_all_ranks(config)
            return main(run, heartbeat) or exit_codes.DONE
        except ConfigError as error:
            return report_config_error(error)


def resolve_or_raise_on_all_ranks(config: JobConfig) -> RunSpec:
    """Resolve ``config`` before any process group exists. Raises ``ConfigError``."""
    try:
        # The launcher has pinned the names; torchrun has not.
        return resolve(pin_names(config), world_size=int(os.environ.get("WORLD_SIZE", "1")))
    except ValueError as error:
        # Ranks of another node may have no error: they would wait in ``main`` for this one.
        init_distributed(config.comm)
        raise_if_unequal({}, mistake=str(error))
        raise


def report_config_error(error: ValueError) -> int:
    """Report an error of the config, and return the exit code for it."""
    # The launcher ends all ranks after the first, before they print: it prints this file instead.
    if (path := os.environ.get("TORCHELASTIC_ERROR_FILE")) is not None:
        with suppress(OSError):  # The launcher then reports the exit codes.
            Path(path).write_text(json.dumps({"message": error_text(error)}))
    else:
        report(error)
    return exit_codes.BAD_CONFIG


if __name__ == "__main__":
    init_logging()
    leave(start(sys.argv[1:]))
