"""Commands, in the repository and in a wheel, and ``train`` for notebooks."""

import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import shardloom
from checkpoint.checkpoint_dir import verify_checkpoint
from config import load_config
from runtime import exit_codes
from runtime.run_folder import list_checkpoints
from tests.lib.launch import without_slow_phases
from tests.lib.patience import PATIENCE_SECONDS
from tests.lib.repository import ROOT
from tests.lib.warm import write_forking_python

SMALL = {
    "training.steps": 4,
    "training.seq_len": 64,
    "training.local_batch_size": 1,
    "training.global_batch_size": 2,
    "validation.enable": False,
    "validation.sample_tokens": 0,
    "metrics.trackers": [],
}
TRAIN = """
from shardloom import TrainingError, train
import data
train("debug_model", {keys}, ngpu=1)
try:
    train("debug_model", {{"training.step": 4}}, show=False)
except TrainingError as error:
    print(error.code, str(error))
"""


def run(
    *arguments: object, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable} | (variables or {})
    return subprocess.run(
        [str(argument) for argument in arguments], env=environment, capture_output=True, text=True
    )


def test_every_tool_is_a_command() -> None:
    programs = {}
    for path in (ROOT / "tools").glob("*.py"):
        for name in re.findall(r'"shardloom ([\w-]+)"', path.read_text()):
            programs[name] = f"tools.{path.stem}"
    tools = {k: v for k, (v, _) in shardloom.COMMANDS.items() if v.startswith("tools.")}
    assert programs.keys() >= {"generate", "status"}
    # Those with a parser; the others parse CONFIG and keys by hand.
    assert programs.items() <= tools.items()
    assert all(find_spec(module) for module, _ in shardloom.COMMANDS.values())


@pytest.mark.parametrize("arguments", [[], ["--help"], ["help"], ["train", "--help"]])
def test_help_ends_with_its_reader(arguments: list[str]) -> None:
    command = [str(ROOT / "shardloom"), *arguments]
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (exit_codes.CLOSED_PIPE, b"")
    whole = run(*command)
    assert (whole.returncode, whole.stderr) == (0, "")
    assert whole.stdout.startswith("usage: ")
    keys = re.findall(r"^  --\w+\.\w+", whole.stdout, flags=re.MULTILINE)
    assert (len(keys) > 50) == ("train" in arguments)


def test_help_of_a_section_fits_the_terminal() -> None:
    done = run(
        ROOT / "run_train.sh", "--help", "optimizer", "data.bos", variables={"COLUMNS": "60"}
    )
    keys = re.findall(r"^  --(\S+)", done.stdout, flags=re.MULTILINE)
    assert {key.partition(".")[0] for key in keys if key != "data.bos"} == {"optimizer"}
    assert "data.bos" in keys
    assert max(map(len, done.stdout.splitlines())) <= 60
    unknown = run(ROOT / "shardloom", "help", "train", "optimiser")
    assert unknown.returncode == exit_codes.BAD_CONFIG
    assert unknown.stderr.endswith("did you mean optimizer?\n")


@pytest.mark.parametrize(
    ("arguments", "config"),
    [
        ([], "debug_model"),
        (["--optimizer.lr", "1"], "debug_model"),
        (["optimizer.lr=1"], "debug_model"),
        (["a=b.toml", "--optimizer.lr", "1"], "a=b.toml"),
        (["llama3_8b"], "llama3_8b"),
        (["x/y.toml", "--optimizer.lr=1"], "x/y.toml"),
    ],
)
def test_config_is_the_first_word(
    arguments: list[str], config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = [word for word in arguments if word != config]
    monkeypatch.delenv("CONFIG_FILE", raising=False)
    assert shardloom.train_module(arguments) == ["launcher.launch", config, *rest]
    monkeypatch.setenv("CONFIG_FILE", config)
    assert shardloom.train_module(arguments) == ["launcher.launch", config, *rest]
    monkeypatch.setenv("CONFIG_FILE", "other.toml")
    if config in arguments:
        with pytest.raises(ValueError, match=r"CONFIG_FILE=other\.toml, but"):
            shardloom.train_module(arguments)
    else:
        assert shardloom.train_module(arguments)[1] == "other.toml"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generat"], "shardloom: 'generat' is not a command; did you mean generate?\n"),
        (["xyz"], "shardloom: 'xyz' is not a command; shardloom --help lists all\n"),
        (["train", "lama3_8b"], "train_configs/; did you mean llama3_8b?\n"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str) -> None:
    done = run(ROOT / "shardloom", *arguments)
    output = without_slow_phases(done.stdout)
    assert (done.returncode, output) == (exit_codes.BAD_CONFIG, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_values_are_written_as_toml(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"a.b": True, "a.c": 3e-4, "a.d": "x y", "a.e": [1, "ä"], "a.f": Path("x")}
    texts = [shardloom._toml(key, value) for key, value in values.items()]
    assert texts == ["true", "0.0003", "x y", '[1, "ä"]', '"x"']
    assert shardloom._toml("a.b", np.int64(3)) == "3"
    assert shardloom._toml("a.b", np.array([0.5, 2])) == "[0.5, 2.0]"
    for prompt in ('"Hi"', "'Hi'", '"', " a ", "true", "[1]", "a\nb", "a = 3", "#"):
        argument = f"--validation.sample_prompt={shardloom._toml('a.b', prompt)}"
        found = load_config(Path("debug_model"), [argument]).validation.sample_prompt
        assert found == prompt
    with pytest.raises(ValueError, match=r"a\.b: give each entry"):
        shardloom.train("debug_model", {"a.b": {"c": 1}})


def test_interrupt_of_a_notebook_saves(tmp_path: Path) -> None:
    keys = SMALL | {"training.steps": 10**6, "job.output_dir": str(tmp_path), "job.name": "run"}
    source = f"""
import sys
from shardloom import train
sys.executable = {write_forking_python(tmp_path)!r}
train('debug_model', {keys}, ngpu=1)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", source], env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    metrics, end = tmp_path / "run" / "metrics.jsonl", time.monotonic() + PATIENCE_SECONDS
    while not metrics.exists():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert "TrainingError: exit code 75" in errors
    assert "stopped by SIGINT" in errors
    (checkpoint,) = list_checkpoints(tmp_path / "run" / "checkpoints")
    assert verify_checkpoint(checkpoint) == []


def test_wheel_trains_elsewhere(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-index", "--no-build-isolation"]
    built = run(*pip, "wheel", *options, "--wheel-dir", tmp_path, ROOT)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    assert run(*pip, "install", *options[:2], "--target", site, wheel).returncode == 0
    names = {path.name for path in site.iterdir()} - {"bin"}
    assert {name for name in names if not name.endswith(".dist-info")} == {"shardloom"}

    # In a folder of other modules with the names of Shardloom's folders.
    folder = tmp_path / "folder"
    folder.mkdir()
    for package in ROOT.glob("*/__init__.py"):
        (folder / package.parent.name).with_suffix(".py").write_text("raise ImportError('planted')")
    (folder / "data.py").write_text("")
    keys = SMALL | {"job.name": "run"}
    variables = {"PYTHONPATH": f"{site}:"}
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"} | variables
    done = subprocess.run(
        [sys.executable, "-c", TRAIN.format(keys=keys)],
        cwd=folder, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "done: 4 steps" in done.stdout
    output = without_slow_phases(done.stdout)
    assert "2 exit code 2\ncommand line: training.step: unknown key" in output
    command = [site / "bin" / "shardloom", "generate", "outputs/run", "--tokens", "4"]
    shown = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, errors="replace"
    )
    assert shown.returncode == 0, shown.stderr
    assert "4 tokens" in shown.stderr
    # The wheel has the page's files.
    command = [site / "bin" / "shardloom", "report", "outputs/run"]
    shown = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert (folder / "report.html").read_bytes().startswith(b"<!doctype html>")
