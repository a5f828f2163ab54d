"""The plan of a schedule is what the schedule says, at its phases and between."""

import pytest

from config.job_config import BatchSizePhase, LrScheduler, Training
from optim.schedule import lr_factor
from report.schedule_plan import plan_schedule

RAMP = [
    BatchSizePhase(steps=1000, global_batch_size=4),
    BatchSizePhase(steps=7, global_batch_size=8),
]


def test_plan_has_all_bounds_and_the_schedule_s_values() -> None:
    training = Training(steps=20_000, seq_len=10, global_batch_size=16, batch_size_ramp=RAMP)
    scheduler = LrScheduler(
        warmup_steps=333, decay_ratio=0.2, decay_type="sqrt", total_steps=30_000
    )
    plan = plan_schedule(training, scheduler, 0.5)
    assert {1, 333, 1000, 1001, 1007, 1008, 20_000} <= set(plan.steps)
    assert plan.steps == sorted(set(plan.steps))
    assert len(plan.steps) < 1100
    assert plan.lr == [0.5 * lr_factor(step, scheduler, 30_000) for step in plan.steps]
    sizes = [40 if step <= 1000 else 80 if step <= 1007 else 160 for step in range(1, 20_001)]
    assert plan.batch_tokens == [sizes[step - 1] for step in plan.steps]
    assert plan.tokens == [sum(sizes[:step]) for step in plan.steps]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_plan_of_a_short_run(steps: int) -> None:
    plan = plan_schedule(Training(steps=steps, global_batch_size=1), LrScheduler(), 1.0)
    assert plan.steps == list(range(1, steps + 1))


def test_plan_needs_a_resolved_batch_size() -> None:
    with pytest.raises(ValueError, match="global_batch_size: absent"):
        plan_schedule(Training(), LrScheduler(), 1.0)
    many = Training(global_batch_size=16, batch_size_ramp=RAMP * 600)
    with pytest.raises(ValueError, match="more than 1,000 phases"):
        plan_schedule(many, LrScheduler(), 1.0)


def test_plan_has_a_learning_rate_of_one_s_own_if_its_function_is_given() -> None:
    training, scheduler = Training(steps=9, global_batch_size=1), LrScheduler(decay_type="a.b:c")
    plan = plan_schedule(training, scheduler, 1.0)
    assert (plan.lr, plan.batch_tokens) == ([], [training.seq_len] * 9)
    plan = plan_schedule(training, scheduler, 0.5, factor=lambda step: step / 9)
    assert plan.lr == [0.5 * step / 9 for step in range(1, 10)]
