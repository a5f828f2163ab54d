"""Warnings for valid keys that are probably not intended, and which others a run could have."""

import pytest
import torch.distributed as dist

from config.auto import with_values
from config.job_config import JobConfig
from run_spec import resolve


@pytest.mark.parametrize(("steps", "total", "lr"), [(5, None, "10 %"), (50, None, ""), (5, 60, "")])
def test_warmup_longer_than_the_run_is_warned_about(
    captured_log: pytest.LogCaptureFixture, steps: int, total: int | None, lr: str
) -> None:
    config = JobConfig.model_validate(
        {
            "training": {"steps": steps},
            "lr_scheduler": {"warmup_steps": 50, "total_steps": total},
            "validation": {"enable": False},
        }
    )
    resolve(config, 1)
    assert ("lr_scheduler.warmup_steps (50) > total_steps (5)" in captured_log.text) == bool(lr)
    assert lr in captured_log.text


@pytest.mark.parametrize(("steps", "is_warned"), [(30, True), (31, False)])
def test_ramp_that_never_ends_is_warned_about(
    captured_log: pytest.LogCaptureFixture, steps: int, is_warned: bool
) -> None:
    ramp = [{"steps": 10, "global_batch_size": 8}, {"steps": 20, "global_batch_size": 16}]
    keys = {"steps": steps, "global_batch_size": 32, "batch_size_ramp": ramp}
    resolve(JobConfig.model_validate({"training": keys, "validation": {"enable": False}}), 1)
    expected = "batch_size_ramp has 30 steps, training.steps is 30: global_batch_size is never"
    assert (expected in captured_log.text) == is_warned


def test_a_run_knows_what_its_ranks_could_train(monkeypatch: pytest.MonkeyPatch) -> None:
    run = resolve(JobConfig(), 2)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    degrees = (1, 2, 4)
    tensor_parallel = [
        with_values(run.config, {"parallelism.tensor_parallel_degree": n}) for n in degrees
    ]
    assert [run.allows(config) for config in tensor_parallel] == [True, True, False]
