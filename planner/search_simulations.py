"""The simulations of a search, which other processes may run."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from config import ConfigError, JobConfig
from planner.depth import period_of
from planner.estimate import Sample
from planner.recorder import StepRecord
from planner.simulate import simulate_step
from planner.step_plan import UNPLANNED, plan_stage, planned_config
from run_spec import RunSpec, resolve


class Request(NamedTuple):
    """A step to simulate."""

    config: JobConfig
    world_size: int
    stage: int = 0
    """Rank of the pipeline."""


Map = Callable[[Callable[[Request], Any], Iterable[Request]], Iterable[Any]]


def reported(run_all: Map, report: Callable[[str], None] | None) -> Map:
    """Return ``run_all``, which calls ``report`` at each tenth of the requests."""

    def run_reported(function: Callable[[Request], Any], requests: Iterable[Request]) -> Any:
        requests = list(requests)
        is_stage, n = function is simulate_stage, len(requests)
        what = "stages planned in full" if is_stage else "samples simulated"
        for number, result in enumerate(run_all(function, requests), start=1):
            if report is not None and 10 * number // n > 10 * (number - 1) // n:
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
    period = period_of(run)
    depths = (period, 2 * period)
    low, high = (
        simulate_step(
            replace(run, model_args=replace(run.model_args, n_layers=depth)),
            request.world_size,
            0,
            weights=[1.0],
        )
        for depth in depths
    )
    dp_shard = run.global_batch_size
    return Sample(low.without_timeline(), high.without_timeline(), depths[0], period, dp_shard)


def simulate_stage(request: Request) -> StepRecord:
    """Plan a step of ``request.stage``, with all microbatches and layers."""
    run = resolve(request.config, request.world_size, has_gpu=True)
    return plan_stage(run, request.world_size, request.stage).without_timeline()
