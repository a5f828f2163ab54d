"""Every config error exits with code 2 and names the key before any rank starts."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from config import ConfigError, load_config
from launcher import launch
from launcher.agent import End
from run_spec import resolve
from runtime import exit_codes
from tests.lib.configs import BAD, TP, Bad, write
from tests.lib.patience import PATIENCE_SECONDS
from tests.lib.repository import ROOT
from tests.lib.warm import READ_AT_START, write_forking_python


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_launcher_rejects_by_name(
    bad: Bad, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(launch, "run_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    arguments = [str(write(tmp_path, bad.toml)), *bad.overrides]
    code = launch.main(arguments, {"NGPU": str(bad.ranks)})
    errors = capsys.readouterr().err
    assert code == exit_codes.BAD_CONFIG
    assert errors.strip()
    assert bad.says in errors
    # One error must not be reported for several keys.
    assert all(bad.key in line for line in errors.splitlines()), errors


def test_launcher_suggests_ranks_for_each_node(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def run_ranks(*_: Any, mistake: str, **__: Any) -> End:
        """Find as many ranks on the head node, which there is not."""
        raise ConfigError([mistake])

    monkeypatch.setattr(launch, "run_ranks", run_ranks)
    nodes = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "head"}
    arguments = [str(ROOT / "train_configs" / "debug_model.toml"), f"--{TP}=3"]
    assert launch.main(arguments, {"NGPU": "4", **nodes}) == exit_codes.BAD_CONFIG
    errors = capsys.readouterr().err
    assert f"{TP} = 3 does not divide 8 ranks; NGPU=3 or 6 on each of 2 nodes would" in errors


def test_trainer_without_a_config_prints_usage(capsys: pytest.CaptureFixture[str]):
    assert train.start([]) == exit_codes.BAD_CONFIG
    assert "train.py CONFIG.toml" in capsys.readouterr().err


def test_launcher_names_a_missing_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert launch.main([str(tmp_path / "absent.toml")], {}) == exit_codes.BAD_CONFIG
    assert "absent.toml" in capsys.readouterr().err


BAD_AT_LOAD = [
    Bad("data.tokenizer", "--data.tokenizer nope", says="cl100k_base"),
    Bad("data.tokenizer", "--data.tokenizer absent.model", says="absent.model"),
    Bad("data.tokenizer", "--data.tokenizer absent.json", says="absent.json"),
    Bad("data.tokenizer", "--data.tokenizer broken.model", says="line 1"),
    Bad("data.tokenizer", "--data.tokenizer broken.json", says="broken.json"),
    Bad("data.path", "--data.source files --data.path absent/*.txt", says="absent/*.txt"),
    Bad("data.path", "--data.source files --data.path .", says="no file"),
    Bad("data.text_key", "--data.source files --data.path rows.jsonl", says="only content"),
    Bad("data.path", "--data.source files --data.path {rows.jsonl,broken.json}", says="no file"),
    Bad("data.path", "--data.source files --data.path *.*", says="mixes tables"),
    Bad("data.validation_percent", "--data.source files --data.path one.txt", says="validation"),
    Bad("model.vocab_size", "--model.vocab_size 257", says="258"),
]


@pytest.mark.parametrize("bad", BAD_AT_LOAD, ids=str)
def test_trainer_rejects_bad_files_by_name(
    bad: Bad, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("broken.model").write_text("not a rank file\n")
    Path("broken.json").write_text("{")
    Path("rows.jsonl").write_text('{"content": "text"}\n')
    Path("one.txt").write_text("text")
    config = load_config(write(tmp_path, bad.toml), bad.overrides)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is what is tested
        resolve(config, world_size=2)
    assert bad.key in str(caught.value)
    assert bad.says in str(caught.value)


@pytest.mark.parametrize(
    "bad",
    [
        Bad("training.steps", "--training.steps ten"),
        Bad("training.seq_len", f"--{TP} 2 --training.seq_len 255"),
        # Only the trainer opens the tokenizer: the launcher must preserve its exit code.
        Bad("data.tokenizer", "--data.tokenizer nope", ranks=1),
    ],
    ids=str,
)
def test_run_train_exits_with_code_2_and_no_traceback(
    bad: Bad, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
):
    # The one that starts a rank starts as a user's.
    is_cold = bad.ranks == 1
    python = sys.executable if is_cold else write_forking_python(tmp_path_factory.mktemp("bin"))
    environment = {k: v for k, v in os.environ.items() if k.startswith(READ_AT_START)}
    environment |= {"PATH": os.environ["PATH"], "PYTHON": python, "NGPU": str(bad.ranks)}
    done = subprocess.run(
        [ROOT / "run_train.sh", *bad.overrides],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == exit_codes.BAD_CONFIG, done.stderr
    assert bad.key in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == [], "a rejected run writes nothing"
