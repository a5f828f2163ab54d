"""Samples of steps that are not undone."""

import json
from pathlib import Path

import pytest

from metrics.samples_file import SamplesFile


@pytest.mark.parametrize(("resumed_step", "kept"), [(None, []), (0, [0]), (200, [0, 100, 200])])
def test_steps_that_a_start_repeats_are_dropped(
    tmp_path: Path, resumed_step: int | None, kept: list[int]
) -> None:
    path = tmp_path / "samples.jsonl"
    sample = {"prompt": "def", "text": "", "seed": 1}
    first = SamplesFile(path, None)
    for step in (0, 100, 200, 300):
        first.write(sample | {"step": step})
    first.close()
    again = SamplesFile(path, resumed_step)
    again.write(sample | {"step": 300})
    again.close()
    assert [json.loads(line)["step"] for line in path.open()] == [*kept, 300]
