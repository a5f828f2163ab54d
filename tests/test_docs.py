"""Every command of README and docs works as written.

Commands of training are resolved as a run resolves them, with their data and tokenizer, before
ranks start; ``--full`` trains them. All others run, in the order of their page.
"""

import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import pytest

import shardloom
from config import load_config
from launcher.launch import check_run, ranks_per_node
from run_spec import resolve
from tests.lib.launch import run
from tests.lib.repository import ROOT
from tests.lib.warm import write_forking_python

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Its commands need each other: tests/test_tutorial.py.
PAGES.remove(ROOT / "docs" / "tutorial.md")
BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"([A-Z_]+=\S+ )*(\./\w|sbatch |srun |pip |uv |python |shardloom )")
NAMED_COMMAND = re.compile(r"\./shardloom [a-z-]+")
# Words of a page that stand for a user's own, and optional arguments.
STANDS_FOR = {
    "outputs/run 400": "outputs/debug_model 2",
    "outputs/run/config.toml 400": "outputs/debug_model/config.toml 2",
    "outputs/run/checkpoints/step-00000100 FOLDER": "outputs/debug_model exported",
    "convert import FOLDER CHECKPOINT": "convert import exported imported",
    "preflight CONFIG": "preflight debug_model",
    "--help SECTION": "--help optimizer",
    "RUN_FOLDER...": "outputs/debug_model",
    "outputs/debug_model outputs/books": "outputs/debug_model",
    "outputs/run": "outputs/debug_model",
    "--logdir outputs": "--version",
    "benchmarks.run NAME": "benchmarks.run --help",
}
OPTIONAL = re.compile(r" \[[^]]*\]")
# Run elsewhere, or not here, and where or why.
ELSEWHERE = {
    "./run_tests.sh": "this test suite",
    "sbatch": "tests/slurm",
    "SWEEP=": "tests/slurm",
    "PREFLIGHT=": "tests/slurm",
    "srun": "tests/slurm",
    "NNODES=4": "tests/slurm",
    "pip install": "tests/test_shardloom.py",
    "pip download": "needs the package index",
    "shardloom ": "an installed package: tests/test_shardloom.py",
    "./shardloom python -m pip install": "needs the package index",
    "./shardloom python -m huggingface_hub": "needs the Hub",
    "./shardloom python -m benchmarks.run": "takes minutes: tests/benchmarks",
    "./shardloom python -m benchmarks.table": "writes docs/benchmarks: tests/benchmarks",
    "./shardloom python -m config schema": "writes a file: tests/config/test_describe.py",
    "./shardloom python -m config reference": "writes a page: test_pages.py",
    "./shardloom python -m tools.torchtitan.keys": "writes a page: test_import_config.py",
    "./shardloom python -m tools.build_site": "needs an extra: test_pages.py",
    "./shardloom python -m http.server": "serves for ever",
    "./shardloom python -m tools.constraints_table": "writes a page: test_constraints.py",
    "./shardloom python -m tests.reliability.scorecard": "takes an hour",
    "./shardloom python -m planner.timeline_svg": "writes docs/images: tests/planner",
    "./shardloom python -m tests.report.screenshots": "writes docs/images",
    "./shardloom plan llama3_8b --world-size 64": "searches for minutes: tests/planner",
    "./shardloom report outputs/debug_model --watch": "serves for ever: tests/report/test_watch.py",
    "./shardloom status --json": "needs jq: tests/tools/test_status.py",
    "./shardloom fetch": "needs the Hub: tests/runtime/test_hub.py",
    "./shardloom prepare c4_tokens": "needs the Hub; tests/tools/test_prepare.py",
    "./shardloom profile": "needs a traced run: tests/tools/test_profile_summary.py",
    "./shardloom COMMAND": "a pattern",
    "./shardloom python ...": "a pattern",
    "python -m": "a pattern",
}
# What a command needs that is missing here, by the key that its error must name.
LACKS = {
    "llama3_8b": "data.tokenizer: ",
    "run_train.sh llama3_124m": "data.tokenizer: ",
    "~/Llama-3.2-1B": "data.tokenizer: ",
    "hf:Qwen/Qwen3-0.6B": "model.flavor: ",
    "run_train.sh mine.toml": "data.tokenizer: ",
}
if find_spec("wandb") is None:
    LACKS['"wandb"'] = "metrics.trackers: "
TORCHTITAN = """
[model]
name = "llama3"
flavor = "8B"
tokenizer_path = "./tokenizer.model"

[training]
dataset = "c4"
"""


@dataclass(frozen=True)
class Documented:
    page: str
    text: str

    @property
    def is_training(self) -> bool:
        words = [word for word in self.text.split() if "=" not in word]
        is_train = words[0] == "./run_train.sh" or words[:2] == ["./shardloom", "train"]
        return is_train and "--help" not in words


def commands_of(page: Path) -> list[Documented]:
    text = page.read_text().replace("\\\n", " ")
    lines = [line for block in BLOCK.findall(text) for line in block.splitlines()]
    # In a sentence only those with arguments: others name the program, or a command of it.
    parts = re.findall(r"`([^`\n]+)`", BLOCK.sub("", text))
    inline = [part for part in parts if " " in part and not NAMED_COMMAND.fullmatch(part)]
    # Without comments, so that one of several pages runs here once.
    lines = [line.partition(" #")[0].rstrip() for line in lines + inline]
    found = [OPTIONAL.sub("", line) for line in lines if COMMAND.match(line)]
    return [Documented(page.name, line) for line in dict.fromkeys(found)]


def all_commands() -> list[Documented]:
    """Commands of all pages, each once."""
    found = {command.text: command for page in PAGES for command in commands_of(page)}
    return list(found.values())


COMMANDS = all_commands()
RUN_HERE = [c for c in COMMANDS if not c.text.startswith(tuple(ELSEWHERE))]


def test_commands_are_found() -> None:
    texts = [command.text for command in COMMANDS]
    assert len(texts) > 40
    # An entry of these tables without a command would hide a later one.
    assert [start for start in ELSEWHERE if not any(t.startswith(start) for t in texts)] == []
    unused = [words for words in [*STANDS_FOR, *LACKS] if not any(words in t for t in texts)]
    assert unused == []


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that looks like the repository, with a run, texts and the files that pages show."""
    folder = tmp_path_factory.mktemp("workspace")
    for name in ("run_train.sh", "shardloom", "train_configs"):
        (folder / name).symlink_to(ROOT / name)
    texts = sorted(Path(os.__file__).parent.glob("[a-s]*.py"))
    (folder / "books" / "python").mkdir(parents=True)
    for path in texts:
        shutil.copy(path, folder / "books" / "python" / f"{path.stem}.txt")
    (folder / "web").mkdir()
    with gzip.open(folder / "web" / "pages.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": path.read_text()}) + "\n" for path in texts[:20])
    howto = {path.name: path.read_text() for path in (ROOT / "docs" / "howto").glob("*.md")}
    mixture = re.search(r"in `mixture\.toml`,\n\n```toml\n(.*?)```", howto["data.md"], re.DOTALL)
    assert mixture is not None
    (folder / "mixture.toml").write_text(mixture[1])
    (folder / "llama3_8b.toml").write_text(TORCHTITAN)
    pages = "\n".join(howto.values())
    for name, text in re.findall(r"^```\w+\n# (\w\S+\.\w+)\n(.*?)^```$", pages, re.M | re.S):
        path = folder / ("" if name.endswith(".toml") else "folder_of_my_models") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    keys = {"training.steps": "4", "checkpoint.interval": "2", "training.seq_len": "128"}
    run(folder / "outputs", 1, **keys, **{"metrics.enable_ledger": "true"})
    return folder


def call(command: Documented, folder: Path) -> None:
    """Run the command; fail if it does."""
    text = command.text
    for words, others in STANDS_FOR.items():
        text = text.replace(words, others)
    # One imports PyTorch, as a user's do.
    is_cold = command.page == "README.md" and " plan " in text
    python = sys.executable if is_cold else write_forking_python(folder)
    own = {"PYTHON": python, "PYTHONPATH": str(folder / "folder_of_my_models")}
    done = subprocess.run(
        ["bash", "-c", text], cwd=folder, env=os.environ | own, capture_output=True,
        text=True, errors="replace",
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr}"


@pytest.mark.parametrize("command", RUN_HERE, ids=lambda c: f"{c.page}: {c.text[:60]}")
def test_command_works_as_written(
    command: Documented,
    workspace: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    lacks = [key for words, key in LACKS.items() if words in command.text]
    if command.is_training and not lacks and request.config.getoption("--full"):
        small = " --training.steps 3 --lr_scheduler.warmup_steps 1 --validation.sample_tokens 0"
        # Runs of other commands have other keys.
        small += f" --job.output_dir {tempfile.mkdtemp(dir=workspace)}"
        small += " --profiling.trace_freq 3" * ("enable_trace" in command.text)
        is_large = "llama3_124m" in command.text
        small += " --training.seq_len 128 --training.local_batch_size 1" * is_large
        call(replace(command, text=command.text + small), workspace)
        return
    if not command.is_training:
        call(command, workspace)
        return
    monkeypatch.chdir(workspace)
    monkeypatch.syspath_prepend(workspace / "folder_of_my_models")
    monkeypatch.delenv("NGPU", raising=False)
    words = shlex.split(command.text, comments=True)
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        monkeypatch.setenv(name, value)
    _, config, *overrides = shardloom.train_module(words[1 if "run_train" in words[0] else 2 :])
    if lacks:
        with pytest.raises((OSError, ValueError), match=lacks[0]):
            resolve_run(config, overrides)
    else:
        resolve_run(config, overrides)


def resolve_run(config: str, overrides: list[str]) -> None:
    """Resolve a run as the launcher and its ranks do."""
    loaded = load_config(Path(config), overrides)
    n_ranks = ranks_per_node(os.environ)
    check_run(loaded, n_ranks, 1)
    resolve(loaded, world_size=n_ranks)
