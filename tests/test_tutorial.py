"""The commands of docs/tutorial.md run in their order, as written.

``--full`` trains the model of the page; otherwise its configuration has smaller numbers.
"""

import os
import re
import shlex
import shutil
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

import shardloom
from config import load_config
from launcher.launch import check_run
from run_spec import resolve
from runtime import exit_codes
from runtime.run_folder import list_checkpoints
from tests.lib.patience import PATIENCE_SECONDS
from tests.lib.repository import ROOT
from tests.lib.warm import write_forking_python

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TRAIN, KILL = "./run_train.sh tutorial.toml", "kill -9 "
# Run with --full only, because other tests run the same programs: test_docs.py, test_convert.py.
SLOW = ("./shardloom preflight", "./shardloom python -c")
# Keys of the page's tutorial.toml in a fast run. Steps after the first checkpoint last 0.5 seconds.
SMALL = {"dim": 64, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "head_dim": 32, "hidden_dim": 96}
SMALL |= {"steps": 45, "interval": 5, "freq": 40, "seq_len": 128, "sample_tokens": 4}


def commands() -> list[str]:
    """Commands of the page in order; a block with other first words is output."""
    blocks = BLOCK.findall(PAGE.replace("\\\n", " "))
    lines = [line for kind, block in blocks if not kind for line in block.splitlines()]
    starts = ("./", "cp ", "mkdir ", KILL, "NGPU=", "sbatch ", "PREFLIGHT=")
    return [line.strip() for line in lines if line.startswith(starts)]


HERE = [text for text in commands() if not text.startswith(("NGPU=", "sbatch ", "PREFLIGHT="))]
ELSEWHERE = [text for text in commands() if text not in HERE]


def configuration(*, is_small: bool) -> str:
    """The page's tutorial.toml."""
    found = re.search(r"^```toml\n(# tutorial\.toml\n.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert found is not None
    text = found[1]
    for key, value in SMALL.items() if is_small else []:
        text, count = re.subn(rf"^{key} = \S+$", f"{key} = {value}", text, flags=re.MULTILINE)
        assert count == 1, key
    return text


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("tutorial")
    for name in ("run_train.sh", "shardloom", "train_configs", "tools"):
        (folder / name).symlink_to(ROOT / name)
    copied = next(text for text in HERE if text.startswith("cp -r "))
    patterns = [name for name in shlex.split(copied)[2:-1] if name != "tools"]
    for path in [path for pattern in patterns for path in ROOT.glob(pattern)]:
        if path.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "images", "results")
            shutil.copytree(path, folder / path.name, ignore=ignored)
        else:
            shutil.copy(path, folder)
    small = not request.config.getoption("--full")
    (folder / "tutorial.toml").write_text(configuration(is_small=small))
    return folder


def test_page_has_its_commands() -> None:
    assert len(HERE) > 10
    assert HERE.count(TRAIN) == 2
    assert len(ELSEWHERE) == 3


def test_commands_run_in_their_order(workspace: Path, request: pytest.FixtureRequest) -> None:
    skipped = () if request.config.getoption("--full") else SLOW
    begin = HERE.index(TRAIN)
    for text in HERE[:begin]:
        call(text, workspace)
    train_and_kill(HERE[begin], HERE[begin + 1], workspace)
    for text in HERE[begin + 2 :]:
        if text.startswith(skipped) or ("transformers" in text and not find_spec("transformers")):
            continue
        output = call(text, workspace)
        if text == TRAIN:
            assert re.search(r"outputs/tutorial, resumed after step \d+", output), output
    assert (workspace / "report.html").exists()


def call(text: str, folder: Path) -> str:
    done = subprocess.run(
        ["bash", "-c", text], cwd=folder, env=environment(folder), capture_output=True, text=True
    )
    assert done.returncode == exit_codes.DONE, f"{text}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {"PYTHON": write_forking_python(folder)}


def train_and_kill(train: str, kill: str, folder: Path) -> None:
    """Train until the first checkpoint is there, then kill the rank as the page does."""
    assert kill.startswith(KILL)
    process = subprocess.Popen(
        shlex.split(train), cwd=folder, env=environment(folder), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    checkpoints = folder / "outputs" / "tutorial" / "checkpoints"
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not list_checkpoints(checkpoints):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.02)
    call(kill, folder)
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == exit_codes.FAILED, output
    assert "was killed by SIGKILL" in output


@pytest.mark.parametrize("text", ELSEWHERE)
def test_commands_of_clusters_are_configurations(
    text: str, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their jobs run in tests/slurm; here their arguments are those of a run."""
    monkeypatch.chdir(workspace)
    words = shlex.split(text)
    start = next(i for i, word in enumerate(words) if word.endswith((".sh", ".sbatch"))) + 1
    _, config, *overrides = shardloom.train_module(words[start:])
    loaded = load_config(Path(config), overrides)
    check_run(loaded, 8, 2 if "--nodes=2" in words else 1)
    resolve(loaded, world_size=16 if "--nodes=2" in words else 8, has_gpu=True)
