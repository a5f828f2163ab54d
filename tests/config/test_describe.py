"""Help and schema cover every key."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

import config
from config import JobConfig
from config.describe import help_text, schema_text

FIELDS = {
    f"{section}.{name}": field
    for section, section_field in JobConfig.model_fields.items()
    for name, field in type(section_field.default).model_fields.items()
}


def test_schema_on_disk_is_current():
    on_disk = Path(config.__file__).with_name("schema.json").read_text()
    assert on_disk == schema_text(), "run: python -m config schema"


def test_choices_of_an_array_are_shown_as_they_are_written() -> None:
    lines = help_text(("metrics.trackers", "float8.skip"), width=1000)
    assert "(array of tensorboard | wandb | mlflow | trackio)" in lines
    assert "(array of strings)" in lines


@cache
def help_lines() -> list[str]:
    return help_text(width=1000).splitlines()


@pytest.mark.parametrize("key", FIELDS)
def test_every_key_has_a_description_and_is_in_the_help(key: str):
    field: Any = FIELDS[key]
    assert field.description
    assert field.description.strip()
    (line,) = [li for li in help_lines() if li.split()[:1] == [f"--{key}"]]
    assert line.endswith(")"), "type and range"
