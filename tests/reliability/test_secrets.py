"""Secrets of the environment are in no file and no output of a run."""

import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime import exit_codes
from tests.lib.launch import start
from tests.lib.patience import PATIENCE_SECONDS

NAMES = [
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "WANDB_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
    "GITHUB_TOKEN",
    "OPENAI_API_KEY",
    "SLURM_JWT",
    "MY_PASSWORD",
    # Of libraries whose other variables are kept.
    "CUDA_SECRET",
    "NCCL_AUTH_TOKEN",
]
# Enables all features that write files, within a few steps.
ALL_OUTPUTS = {
    "training.steps": "4",
    "checkpoint.interval": "2",
    "metrics.trackers": '["tensorboard"]',
    "metrics.enable_ledger": "true",
    "profiling.enable_trace": "true",
    "profiling.trace_freq": "3",
    "validation.sample_tokens": "4",
}
ENDS = {
    "trained": (exit_codes.DONE, {}),
    # PyTorch raises deep inside, on both ranks: it knows this backend, which is not installed.
    "crashed": (1, {"compile.enable": "true", "compile.backend": "tvm"}),
    "refused": (exit_codes.BAD_CONFIG, {"training.stepz": "4"}),
}


@pytest.fixture
def canaries(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Put random secrets into the environment; return them by name."""
    found = {name: secrets.token_hex(16) for name in NAMES}
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    return found


def leaks(folder: Path, output: str, canaries: dict[str, str]) -> set[str]:
    """List leaked secrets as "NAME in FILE"."""
    written = {name: (folder / name).read_bytes() for name in files_in(folder)}
    written["output"] = output.encode()
    return {
        f"{name} in {file}"
        for file, content in written.items()
        for name, value in canaries.items()
        if value.encode() in content or value.encode() in file.encode()
    }


def files_in(folder: Path) -> list[str]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return [str(path.relative_to(folder)) for path in paths]


@pytest.mark.row(25, "Secrets are never written")
@pytest.mark.parametrize("end", ENDS)
def test_no_secret_is_written(
    tmp_path: Path,
    canaries: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    end: str,
    record_result: Callable[[str], None],
) -> None:
    # Temporary files of PyTorch count too.
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    code, overrides = ENDS[end]
    process = start(tmp_path / "out", 2, **ALL_OUTPUTS | overrides)
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == code, output
    assert ("Traceback" in output) == (end == "crashed")
    files = files_in(tmp_path)
    if end == "trained":
        kinds = (
            "metrics.jsonl",
            "samples.jsonl",
            "provenance/attempt",
            "config.toml",
            "events.out.tfevents",
            "traces/",
            "manifest.json",
        )
        assert all(any(kind in name for name in files) for kind in kinds)
    assert not leaks(tmp_path, output, canaries)
    record_result(f"{end}: {len(canaries)} secrets, {len(files)} files and the output, 0 found")


def test_leak_is_detected(tmp_path: Path, canaries: dict[str, str]) -> None:
    assert not leaks(tmp_path, "output", canaries)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "environment.json").write_text(json.dumps(dict(os.environ)))
    assert leaks(tmp_path, f"token={canaries['HF_TOKEN']}", canaries) == {
        "HF_TOKEN in output",
        *(f"{name} in deep/environment.json" for name in NAMES),
    }
