"""Datasets of the Hugging Face Hub, from a server here: a run reads one commit of them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from config import JobConfig, dump_toml
from config.job_config import (
    Data,
    DataSource,
    DocumentSource,
    Job,
    Validation,
    ValidationSource,
)
from data.hub import pin_datasets
from runtime import exit_codes
from tests.lib.formats import lines
from tests.lib.hub import Hub, serve
from tests.lib.launch import curve, start
from tests.lib.patience import PATIENCE_SECONDS
from tests.lib.repository import ROOT

pytestmark = pytest.mark.usefixtures("warm_starts")


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve(Hub(files("first"), repository="owner/data", kind="datasets")) as found:
        yield found


def files(word: str) -> dict[str, bytes]:
    return {"README.md": b"# Data\n", "train.jsonl": lines([f"{word} {i} " * 9 for i in range(40)])}


def opened(hub: Hub, folder: Path, revision: str = "", **variables: str) -> list[str]:
    """(commit, fingerprint, first text) of the stream, (fingerprint, first text) of the table."""
    environment = os.environ | hub.environment(folder / "home") | variables
    command = [sys.executable, "-m", "tests.lib.open_hub", str(folder), revision]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


def test_commit_is_part_of_the_fingerprints(hub: Hub, tmp_path: Path) -> None:
    """Also without network, where ``datasets`` takes what is in its cache."""
    first = hub.commit
    before = opened(hub, tmp_path)
    assert before[0] == first
    assert opened(hub, tmp_path, HF_HUB_OFFLINE="1")[::2] == before[::2]
    hub.push(files("first") | {"LICENSE": b"free"})
    after = opened(hub, tmp_path)
    assert after[0] == hub.commit
    assert after[2::2] == before[2::2], "the same texts"
    assert not {*after[1::2]} & {*before[1::2]}
    assert opened(hub, tmp_path, first) == before


def test_each_source_keeps_its_own_commit(tmp_path: Path) -> None:
    """Of one dataset, of which only training names a revision; the newest is another later."""
    commits = {"v1": "1" * 40, "": "2" * 40}

    def builder(source: DocumentSource) -> SimpleNamespace:
        return SimpleNamespace(hash=commits.get(source.revision, source.revision))

    keys: dict[str, Any] = {"path": "owner/data", "type": "huggingface"}
    validation = Validation(sources=[ValidationSource(**keys, name="own", split="test")])
    for revisions in (("v1",), ("v1", "")):
        sources = [DataSource(**keys, revision=r, name=f"source {r}") for r in revisions]
        folder = tmp_path / str(len(revisions))
        config = JobConfig(
            job=Job(output_dir=str(folder)), data=Data(sources=sources), validation=validation
        )
        with patch("data.hub._builder", builder):
            pinned = pin_datasets(config)
            found = [s.revision for s in (*pinned.data.mixture, *pinned.validation.sources)]
            assert found == [commits[r] for r in (*revisions, "")]
            pinned.job.folder.mkdir(parents=True)
            (pinned.job.folder / "config.toml").write_text(dump_toml(pinned))
            with patch.dict(commits, {"": "3" * 40}):
                assert pin_datasets(config) == pinned


def test_run_keeps_the_commit_of_its_first_start(hub: Hub, tmp_path: Path) -> None:
    keys = {
        "data.source": "huggingface", "data.path": "owner/data", "checkpoint.interval": "2",
        "validation.enable": "false",
    }  # fmt: skip

    def train(name: str, steps: int, **more: str) -> tuple[int, str]:
        more |= keys | {"training.steps": str(steps)}
        environment = hub.environment(tmp_path / "home")
        process = start(tmp_path / name, 1, environment=environment, **more)
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
        return process.returncode, output

    first = hub.commit
    for name, steps in (("whole", 4), ("parts", 2)):
        code, output = train(name, steps)
        assert code == 0, output
    hub.push(files("second"))
    code, output = train("parts", 4)
    assert code == 0, output
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    code, output = train("parts", 6, **{"data.revision": "main"})
    assert code == exit_codes.BAD_CONFIG, output
    change = f"data.revision: '{first}' to '{hub.commit}'"
    assert f"{change}; a branch or tag follows the Hub" in output
