"""What a start tells of keys that run, but hardly as they were meant."""

import pytest

from config.job_config import JobConfig
from job import resolve


@pytest.mark.parametrize(("steps", "total", "lr"), [(5, None, "10 %"), (50, None, ""), (5, 60, "")])
def test_a_warmup_that_outlasts_the_run_is_told(
    told: pytest.LogCaptureFixture, steps: int, total: int | None, lr: str
) -> None:
    config = JobConfig.model_validate(
        {
            "training": {"steps": steps},
            "lr_scheduler": {"warmup_steps": 50, "total_steps": total},
            "validation": {"enable": False},
        }
    )
    resolve(config, 1)
    assert ("lr_scheduler.warmup_steps: 50 of 5 steps" in told.text) == bool(lr)
    assert lr in told.text
