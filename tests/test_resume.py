"""What a start tells of the weights that it is given."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpoint.manifest import write_manifest
from config.job_config import JobConfig
from data.tokenizer import load_tokenizer
from resume import warn_of_tokenizer
from runtime import exit_codes
from tools import train_tokenizer


def started_from(folder: Path, tokenizer: str) -> Any:
    keys = {"checkpoint": {"initial_load_path": str(folder)}, "data": {"tokenizer": tokenizer}}
    config = JobConfig.model_validate(keys)
    return SimpleNamespace(config=config, tokenizer=load_tokenizer(tokenizer))


def test_weights_that_know_other_tokens_are_told(
    told: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    text = f"--data.path={Path(json.__file__).parent}/*.py"
    arguments = ["--vocab_size=300", "--data.source=files", text]
    assert train_tokenizer.main([str(theirs), *arguments]) == exit_codes.DONE
    (theirs / "config.json").write_text("{}")
    own = str(theirs / "tokenizer.json")
    ours.mkdir()
    facts = {"fingerprints": {"tokenizer": load_tokenizer(own).fingerprint}}
    write_manifest(ours, {}, facts)
    for folder in (ours, theirs):
        told.clear()
        warn_of_tokenizer(started_from(folder, own))
        assert "data.tokenizer" not in told.text
        warn_of_tokenizer(started_from(folder, "bytes"))
        assert f"data.tokenizer: bytes is not that of {folder}" in told.text
    # The same ids in another file.
    told.clear()
    warn_of_tokenizer(started_from(theirs, str(theirs / "tokenizer.tiktoken")))
    assert "data.tokenizer" not in told.text
    (theirs / "tokenizer.json").unlink()
    warn_of_tokenizer(started_from(theirs, "bytes"))
    assert "not known whether" in told.text
