"""Resuming: what a start compares with the checkpoint or the weights, and without steps to do."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpoint.manifest import write_manifest
from config import ConfigError
from config.job_config import Data, JobConfig
from config.resume_compat import by_key
from data.sources import build_sources
from data.tokenizer import load_tokenizer
from models import find_spec
from resume import validate_initial, warn_if_data_changed, warn_if_tokenizer_differs
from runtime import exit_codes
from tests.lib import forked
from tools import train_tokenizer


def started_from(folder: Path, tokenizer: str, **markers: str) -> Any:
    keys = {"checkpoint": {"initial_load_path": str(folder)}, "data": {"tokenizer": tokenizer}}
    config = JobConfig.model_validate(keys)
    return SimpleNamespace(config=config, tokenizer=load_tokenizer(tokenizer, **markers))


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
    for key, names in (("bos", ["<|end_of_text|>"]), ("eos", ["<|begin_of_text|>"])):
        captured_log.clear()
        warn_if_tokenizer_differs(started_from(hugging_face, own, **dict.fromkeys([key], *names)))
        known = getattr(load_tokenizer(own), f"{key}_id")
        assert f"its weights know id {known} as data.{key}, not id " in captured_log.text
    for file in hugging_face.glob("tokenizer*"):
        file.unlink()
    warn_if_tokenizer_differs(started_from(hugging_face, "bytes"))
    assert "cannot check the tokenizer" in captured_log.text


@pytest.mark.parametrize("is_saved", [False, True])
def test_tokenizer_that_cannot_encode_the_probe_is_not_compared(
    captured_log: pytest.LogCaptureFixture, tmp_path: Path, is_saved: bool
) -> None:
    words = tmp_path / "words.json"
    model = {"type": "WordLevel", "vocab": {"a": 0, "</s>": 1}, "unk_token": "none"}
    end = {"id": 1, "content": "</s>", "special": True, "single_word": False, "lstrip": False}
    end |= {"rstrip": False, "normalized": False}
    words.write_text(json.dumps({"version": "1.0", "added_tokens": [end], "model": model}))
    names = [str(words), "bytes"] if is_saved else ["bytes", str(words)]
    saved, own = names
    config = {"data": {"tokenizer": saved}}
    fingerprints = {"tokenizer": load_tokenizer(saved).fingerprint}
    write_manifest(tmp_path, {}, {"fingerprints": fingerprints, "config": config})
    warn_if_tokenizer_differs(started_from(tmp_path, own))
    assert "cannot check the tokenizer" in captured_log.text


def test_weights_of_a_model_with_other_arguments_are_rejected() -> None:
    """Heads, rotary base and epsilon change no shape, so loading would not fail."""
    config = JobConfig.model_validate({"checkpoint": {"initial_load_path": "a/step-1"}})
    args = find_spec("llama3").flavors["debugmodel"]
    run: Any = SimpleNamespace(config=config, model_args=args)
    manifest = {"config": config.model_dump(), "model_args": asdict(args)}

    def validate(name: str = config.model.name, **saved: object) -> None:
        other = by_key(manifest["config"]) | {"model.name": name}
        changed = asdict(args) | {"max_seq_len": 7} | saved
        validate_initial(run, {"config": other, "model_args": changed})

    validate()
    for name, value in (("n_heads", 1), ("rope_theta", 77.0), ("norm_eps", 0.1)):
        for model in (config.model.name, "my:SPEC"):
            with pytest.raises(ConfigError, match=f"a/step-1 was trained with .*: {name}: {value}"):
                validate(model, **{name: value})
    with pytest.raises(ConfigError, match=r"rope_scaling: \{.*\} to unset"):
        validate(rope_scaling={"factor": 8.0})
    with pytest.raises(ConfigError, match="window: 8 no longer exists"):
        validate(window=8)
    validate("my:SPEC", window=8)


def test_start_without_steps_to_do_keeps_the_configuration(tmp_path: Path) -> None:
    forked.run(tmp_path, 1, **{"training.steps": "3"})
    path = tmp_path / "debug_model" / "config.toml"
    config = path.read_text()
    forked.run(tmp_path, 1, **{"training.steps": "2", "optimizer.lr": "1.0"})
    assert path.read_text() == config
    assert f"{path} stays as it is" in forked.log(tmp_path)


@pytest.mark.row(45, "Data that changed after the checkpoint are reported")
def test_files_that_changed_after_the_checkpoint_are_warned_about(
    captured_log: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The fingerprint reads neither of them, and their sizes and times are those of before."""
    paths = [tmp_path / "data" / f"{i:03}.txt" for i in range(200)]
    paths[0].parent.mkdir()
    for path in paths:
        path.write_text("text")
    config = Data(source="files", path=f"{tmp_path}/data/*")

    def warn() -> str:
        captured_log.clear()
        sources, _ = build_sources(config, 0)
        fingerprints.append(sources[0].fingerprint)
        training_data = SimpleNamespace(sources=sources)
        run: Any = SimpleNamespace(folder=tmp_path, training_data=training_data)
        warn_if_data_changed(run, 7)
        return captured_log.text

    fingerprints: list[str] = []
    checkpoint = tmp_path / "checkpoints" / "step-00000007"
    checkpoint.mkdir(parents=True)
    write_manifest(checkpoint, {}, {})
    assert warn() == ""
    now = (checkpoint / "manifest.json").stat().st_mtime
    for path in (paths[1], paths[6]):
        times = path.stat().st_atime, path.stat().st_mtime
        path.write_text("TEXT")
        os.utime(path, times)
    # File systems count time in steps of milliseconds.
    os.utime(checkpoint / "manifest.json", (now - 1, paths[1].stat().st_ctime - 1e-3))
    for path in paths:
        assert path in (paths[1], paths[6]) or path.stat().st_ctime <= now
    assert "data: 2 files changed after step-00000007 was saved, the first " in warn()
    assert len({*fingerprints}) == 1
