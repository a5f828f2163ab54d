"""The lines that end a run's log."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from config.job_config import JobConfig
from runtime import exit_codes
from runtime.exit_codes import stopped_by
from train_loop import log_outcome

INTERRUPTED = stopped_by("SIGINT", has_checkpoints=True)


@pytest.mark.parametrize(
    ("stop", "is_saved", "hint"),
    [
        (INTERRUPTED, False, "stopped by SIGINT after step 0; nothing was saved"),
        (INTERRUPTED, True, "stopped by SIGINT after step 0; run the same command to resume"),
        (exit_codes.NOT_FINITE, False, exit_codes.NOT_FINITE.hint),
    ],
)
def test_only_checkpoints_that_exist_are_named(
    stop: exit_codes.StopReason,
    is_saved: bool,
    hint: str,
    tmp_path: Path,
    captured_log: pytest.LogCaptureFixture,
) -> None:
    run: Any = SimpleNamespace(config=JobConfig(), folder=tmp_path)
    log_outcome(run, 0, stop, has_checkpoints=is_saved)
    first, *others = captured_log.messages
    assert hint in first
    assert (f"checkpoints: {tmp_path / 'checkpoints'}" in others) == is_saved
