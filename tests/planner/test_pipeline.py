"""A long pipeline is planned by short ones, with the same result."""

from dataclasses import replace
from unittest.mock import patch

import pytest

from planner import pipeline
from planner.pipeline import simulate_pipeline
from planner.simulate import simulate_step
from planner.step_plan import planned_config
from tests.lib.marks import slow
from tests.lib.planned import BATCH, PP, SCHEDULE, Keys, run_of

FIRST = "parallelism.pipeline_parallel_first_stage_less_layers"
LAST = "parallelism.pipeline_parallel_last_stage_less_layers"
# As many activations of a microbatch that the peak is in backward.
LONG = {PP: 4, "model.args.n_layers": 6, "training.seq_len": 512}
DEEP = LONG | {SCHEDULE: "Interleaved1F1B", "model.args.n_layers": 8, FIRST: 0, LAST: 0}


@pytest.mark.parametrize(
    ("rank", "n", "keys"),
    [
        slow(0, 4, LONG),
        (0, 7, LONG),
        slow(1, 6, LONG),
        (3, 5, LONG),
        (0, 12, DEEP),
        slow(3, 4, DEEP),
    ],
    ids=str,
)
def test_records_are_those_of_the_whole_pipeline(rank: int, n: int, keys: Keys) -> None:
    run = run_of(keys | {BATCH: n, "training.local_batch_size": n}, 4)
    run = replace(run, config=planned_config(run.config))
    longest = 0

    def simulate(*args: object, weights: list[float]) -> object:
        nonlocal longest
        longest = max(longest, len(weights))
        return simulate_step(*args, weights=weights)  # type: ignore[arg-type]

    with patch.object(pipeline, "simulate_layers", simulate):
        found = simulate_pipeline(run, 4, rank, n)
    real = simulate_step(run, 4, rank, weights=[1.0] * n)
    # Of an interleaved schedule, the memory is an estimate: of many microbatches, and with PyTorch
    # 2.15, whose last rank holds a hidden state less.
    rel = 0.0 if SCHEDULE not in keys else 0.03 if n > 8 else 0.01
    assert found.peak == pytest.approx(real.peak, rel=rel)
    assert replace(found, memory=real.memory) == real
    assert longest < n or n == 4
