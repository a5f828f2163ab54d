"""A deep model is simulated by two shallow ones, with the same result."""

from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest

from planner import depth
from planner.recorder import GRANULARITY
from planner.simulate import simulate_step
from planner.step_plan import planned_config
from planner.step_record import StepRecord
from run_spec import RunSpec
from tests.lib.planned import (
    BATCH,
    EMULATED,
    EP,
    FLOAT8,
    NEXT,
    PP,
    RECOMPUTE,
    TP,
    Keys,
    run_of,
)

LAYERS = "model.args.n_layers"


def test_a_model_with_a_layer_that_is_named_is_simulated_whole() -> None:
    keys = {LAYERS: 5, FLOAT8: "tensorwise", "float8.skip": '["layers.4"]'} | EMULATED
    run = run_of(keys, 1)
    run = replace(run, config=planned_config(run.config))
    found = depth.simulate_layers(run, 1, 0, weights=[1.0])
    assert found == simulate_step(run, 1, 0, weights=[1.0])


@pytest.mark.parametrize(
    ("world_size", "rank", "keys"),
    [
        (2, 0, {LAYERS: 5, TP: 2, FLOAT8: "tensorwise", RECOMPUTE: "selective"} | EMULATED),
        (2, 1, {LAYERS: 10, PP: 2, BATCH: 4}),
        (2, 0, NEXT | {LAYERS: 8, EP: 2}),
    ],
    ids=str,
)
def test_records_are_those_of_the_whole_model(world_size: int, rank: int, keys: Keys) -> None:
    run = run_of(keys, world_size)
    run = replace(run, config=planned_config(run.config))
    depths = []

    def simulate(
        run: RunSpec, world_size: int, rank: int, *, weights: Sequence[float], n_more: int = 0
    ) -> StepRecord:
        depths.append(run.model_args.n_layers)
        return simulate_step(run, world_size, rank, weights=weights, n_more=n_more)

    weights = [1.0] * (2 if PP in keys else 1)
    with patch.object(depth, "simulate_step", simulate):
        found = depth.simulate_layers(run, world_size, rank, weights=weights)
    whole = simulate_step(run, world_size, rank, weights=weights)
    # The scales of all layers are one tensor, whose size is rounded.
    rounding = GRANULARITY if FLOAT8 in keys else 0
    assert found.memory == pytest.approx(whole.memory, rel=0, abs=rounding)
    assert replace(found, memory=whole.memory) == whole
    assert max(depths) < run.model_args.n_layers
