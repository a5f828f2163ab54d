"""Tokenizer warnings for initial weights."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpoint.manifest import write_manifest
from config.job_config import JobConfig
from data.tokenizer import load_tokenizer
from resume import warn_if_tokenizer_differs
from runtime import exit_codes
from tools import train_tokenizer


def started_from(folder: Path, tokenizer: str) -> Any:
    keys = {"checkpoint": {"initial_load_path": str(folder)}, "data": {"tokenizer": tokenizer}}
    config = JobConfig.model_validate(keys)
    return SimpleNamespace(config=config, tokenizer=load_tokenizer(tokenizer))


def test_weights_of_another_tokenizer_are_warned_about(
    captured_log: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    shardloom, hugging_face = tmp_path / "shardloom", tmp_path / "hugging_face"
    text = f"--data.path={Path(json.__file__).parent}/*.py"
    arguments = ["--vocab_size=300", "--data.source=files", text]
    assert train_tokenizer.main([str(hugging_face), *arguments]) == exit_codes.DONE
    (hugging_face / "config.json").write_text("{}")
    own = str(hugging_face / "tokenizer.json")
    shardloom.mkdir()
    metadata = {"fingerprints": {"tokenizer": load_tokenizer(own).fingerprint}}
    write_manifest(shardloom, {}, metadata)
    for folder in (shardloom, hugging_face):
        captured_log.clear()
        warn_if_tokenizer_differs(started_from(folder, own))
        assert "data.tokenizer" not in captured_log.text
        warn_if_tokenizer_differs(started_from(folder, "bytes"))
        assert f"data.tokenizer: bytes is not the tokenizer of {folder}" in captured_log.text
    # The same token ids in another file format.
    captured_log.clear()
    warn_if_tokenizer_differs(started_from(hugging_face, str(hugging_face / "tokenizer.tiktoken")))
    assert "data.tokenizer" not in captured_log.text
    (hugging_face / "tokenizer.json").unlink()
    warn_if_tokenizer_differs(started_from(hugging_face, "bytes"))
    assert "cannot check the tokenizer" in captured_log.text
