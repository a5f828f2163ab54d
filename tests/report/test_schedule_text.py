"""The drawing of a schedule has its values, and fits 80 columns."""

import random

import pytest

from config.job_config import BatchSizePhase, LrScheduler, Training
from report.schedule_plan import SchedulePlan, plan_schedule
from report.schedule_text import BLOCKS, COLUMNS, NAME_WIDTH, ROWS, draw_schedule

RAMP = [BatchSizePhase(steps=60, global_batch_size=8)]


def heights(lines: list[str]) -> list[int]:
    """Eighths of a row that each column has, from the bottom."""
    rows = [line[NAME_WIDTH + 1 :].ljust(COLUMNS) for line in lines]
    return [sum(BLOCKS.index(row[i]) for row in rows) for i in range(COLUMNS)]


def test_columns_are_as_high_as_the_schedule() -> None:
    scheduler = LrScheduler(warmup_steps=10, decay_ratio=0.5, min_lr_factor=0.0)
    plan = plan_schedule(Training(steps=COLUMNS, global_batch_size=8), scheduler, 3e-4)
    lines = draw_schedule(plan)
    assert lines[0].split()[:2] == ["lr", "0.0003"]
    found = heights(lines[:ROWS])
    assert len(found) == len(plan.lr)
    for eighths, lr in zip(found, plan.lr, strict=True):
        assert eighths == max(round(8 * ROWS * lr / 3e-4), int(lr > 0))
    assert lines[-2].split() == ["step", "1", "10", "33", "66"]
    assert len(lines) == ROWS + 3, "without a ramp there is no drawing of the batch"


def test_a_ramp_is_drawn() -> None:
    training = Training(steps=120, seq_len=100, global_batch_size=16, batch_size_ramp=RAMP)
    lines = draw_schedule(plan_schedule(training, LrScheduler(warmup_steps=5), 1.0))
    assert lines[ROWS].split()[:2] == ["batch", "1,600"]
    found = heights(lines[ROWS : ROWS + 2])
    assert set(found[: COLUMNS // 2 - 1]) == {8}
    assert set(found[COLUMNS // 2 + 1 :]) == {16}


@pytest.mark.parametrize("seed", range(40))
def test_any_plan_fits(seed: int) -> None:
    noise = random.Random(seed)
    steps = sorted(noise.sample(range(1, 10 ** noise.randint(3, 12)), noise.randint(1, 500)))
    largest = 10.0 ** noise.randint(-300, 5)
    plan = SchedulePlan(
        steps,
        [noise.choice((0.0, noise.random())) * largest for _ in steps],
        [noise.randint(1, 10**9) for _ in steps],
        [10**6 * step for step in steps],
    )
    lines = draw_schedule(plan)
    assert max(map(len, lines)) <= 80
    assert all(line.isprintable() for line in lines)
    assert lines[-2].endswith(f"{steps[-1]:,}")
