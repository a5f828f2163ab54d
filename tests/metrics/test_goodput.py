from typing import Any

from metrics.goodput import goodput
from metrics.history import ROLLED_BACK


def line(step: int, at: float, seconds: float) -> dict[str, Any]:
    return {"step": step, "time": at, "seconds_per_step": seconds, "loss": 1.0}


def test_goodput_counts_each_step_once() -> None:
    clean = [line(1, 100.0, 9.0), line(10, 109.0, 1.0), line(20, 119.0, 1.0)]
    assert goodput(clean, 119.0) == 1.0
    assert goodput(clean, 138.0) == 0.5
    validation = {"step": 20, "time": 120.0, "validation_loss": 1.0}
    assert goodput([*clean, validation], 119.0) == 19 / 20
    # The first validation is waste, as later ones are.
    first = {"step": 0, "time": 90.0, "validation_loss": 1.0}
    assert goodput([first, *clean], 128.0) == 19 / 38
    # Rolled back from 30 to 15: step 20 is repeated, 30 no longer counts.
    rolled_back = [*clean, line(30, 129.0, 1.0), line(20, 134.0, 1.0)]
    assert goodput(rolled_back, 138.0) == 0.5
    # Rolled back from 20 to 15, and nothing is repeated yet.
    assert goodput([*clean, {"step": 15, "time": 120.0, ROLLED_BACK: 20}], 120.0) == 9 / 20
    # Resumed from a checkpoint of step 15: steps 16 to 20 have no line of their own.
    resumed = [*clean[:2], line(20, 147.0, 2.0)]
    assert goodput(resumed, 149.0) == (9 + 20) / 49
    # The first step of a start compiles, for 9 s of which one is useful.
    compiling = [*clean, line(21, 131.0, 9.0) | {"restarts": 1}]
    assert goodput(compiling, 131.0) == 20 / 31
    # Restarted from the first step: earlier steps are lost, and their time still counts.
    restarted = [*clean, line(1, 130.0, 9.0), line(10, 139.0, 1.0)]
    assert goodput(restarted, 145.0) == 9 / 45
    assert goodput(clean[:1], 200.0) is None
    # A failure's time is in whole seconds, so it may be before the last line.
    assert goodput(clean, 109.0) == 1.0
    # The clock was set back.
    assert goodput([*clean, line(30, 100.0, 1.0)], 100.0) is None
    assert goodput([], 200.0) is None
