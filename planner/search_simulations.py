"""The simulations of a search, which other processes may run."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from config import ConfigError, JobConfig
from planner.depth import period_of
from planner.estimate import Sample
from planner.simulate import simulate_step
from planner.step_plan import UNPLANNED, plan_stage, planned_config
from planner.step_record import ACTIVATIONS, UPDATE, StepRecord
from run_spec import RunSpec, resolve


class Request(NamedTuple):
    """A step to simulate."""

    config: JobConfig
    world_size: int
    stage: int = 0
    """Rank of the pipeline."""
    schedule: str = "1F1B"
    """Of the pipeline that a sample, which has none, stands for."""


MANY = 20
Map = Callable[[Callable[[Request], Any], Iterable[Request]], Iterable[Any]]


def reported(run_all: Map, report: Callable[[str], None] | None) -> Map:
    """Return ``run_all``, which calls ``report`` at each tenth of many requests, and at the end."""

    def run_reported(function: Callable[[Request], Any], requests: Iterable[Request]) -> Any:
        requests = list(requests)
        is_stage, n = function is simulate_stage, len(requests)
        what = "stages planned in full" if is_stage else "samples simulated"
        n_lines = 10 if is_stage or n > MANY else 1
        for number, result in enumerate(run_all(function, requests), start=1):
            if report is not None and n_lines * number // n > n_lines * (number - 1) // n:
                report(f"search: {number} of {n} {what}")
            yield result

    return run_reported


def simulate_sample(request: Request) -> Sample | None:
    """Simulate two depths; None if the configuration is not legal, or not planned yet."""
    try:
        run = resolve(planned_config(request.config), request.world_size, has_gpu=True)
        return None if any(row.violated(run) for row in UNPLANNED) else _sample(run, request)
    except ConfigError:
        # Building may find it, such as float8 without a layer that is large enough.
        return None


def _sample(run: RunSpec, request: Request) -> Sample:
    parallelism = run.config.parallelism.model_copy(
        update={"pipeline_parallel_schedule": request.schedule}
    )
    run = replace(run, config=run.config.model_copy(update={"parallelism": parallelism}))
    period, n_sequences = period_of(run), run.global_batch_size

    def simulated(depth: int, size: int) -> StepRecord:
        shallow = replace(
            run,
            model_args=replace(run.model_args, n_layers=depth),
            microbatch_size=size,
            global_batch_size=size * n_sequences,
        )
        return simulate_step(shallow, request.world_size, 0, weights=[1.0])

    low, high = simulated(period, 1), simulated(2 * period, 1)
    of_weights = {}
    if run.config.float8.recipe != "none":
        wide = simulated(2 * period, 2)
        of_weights = {
            phase: max(2 * size - wide.traffic[phase], 0.0) / 2
            for phase, size in high.traffic.items()
            if phase != UPDATE
        }
    return Sample(
        low=low.without_timeline(),
        high=high.without_timeline(),
        period=period,
        dp_shard=n_sequences,
        activations=(low.most(ACTIVATIONS), high.most(ACTIVATIONS)),
        of_weights=of_weights,
    )


def simulate_stage(request: Request) -> StepRecord:
    """Plan a step of ``request.stage``, with all microbatches and layers."""
    run = resolve(request.config, request.world_size, has_gpu=True)
    return plan_stage(run, request.world_size, request.stage).without_timeline()
