"""Files of others run no code: checkpoints, data sets and run folders. See docs/security.md."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from config.job_config import DataSource
from data.tables import HubTable
from runtime import exit_codes
from tests.lib.planted import MODULES, imported_modules, plant_modules
from tests.lib.repository import ROOT
from tests.lib.saved import write_checkpoint
from tools import convert, generate

# Row 30: code

OUTSIDE = "planted_models:SPEC"
MODULE = """
from pathlib import Path
from models.llama3 import SPEC
Path(__file__).with_name("imported").touch()
"""


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File that exists once the module of ``OUTSIDE``, which can be imported, has run."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "planted_models.py").write_text(MODULE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "planted_models", raising=False)
    return folder / "imported"


def named(folder: Path, name: str) -> Path:
    config = {"model": {"name": name}, "data": {"tokenizer": "bytes"}}
    return write_checkpoint(folder, config=config)


@pytest.mark.row(30, "A checkpoint's model is imported only if the caller names it")
def test_model_of_a_checkpoint_is_not_imported(
    tmp_path: Path,
    planted: Path,
    capsys: pytest.CaptureFixture[str],
    record_result: Callable[[str], None],
) -> None:
    checkpoint = named(tmp_path / "checkpoint", OUTSIDE)
    tools: list[tuple[Callable[[list[str]], int], list[str]]] = [
        (generate.main, [str(checkpoint), "--tokens", "2"]),
        (convert.main, ["export", str(checkpoint), str(tmp_path / "exported")]),
    ]
    for tool, arguments in tools:
        assert tool(arguments) == exit_codes.BAD_CONFIG
        assert f"set --model {OUTSIDE}" in capsys.readouterr().err
        assert tool([*arguments, "--model", "other_models:SPEC"]) == exit_codes.BAD_CONFIG
        assert "not 'other_models:SPEC' of argument --model" in capsys.readouterr().err
        assert not planted.exists()
    for tool, arguments in tools:
        assert tool([*arguments, "--model", OUTSIDE]) == exit_codes.DONE, capsys.readouterr().err
    assert planted.exists(), "the module could be imported all along"
    record_result(f"{len(tools)} of {len(tools)} tools: 0 imports, 1 if --model names it")


@pytest.mark.parametrize("name", ["models:MODEL_SPECS", "venv.__main__:x", "os:", ":", "a:b:c"])
def test_no_name_with_a_colon_is_imported(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = set(sys.modules)
    checkpoint = named(tmp_path / "checkpoint", name)
    assert generate.main([str(checkpoint)]) == exit_codes.BAD_CONFIG
    assert f"{checkpoint}: model.name is {name!r}" in capsys.readouterr().err
    assert "venv" not in set(sys.modules) - before


def test_script_of_a_data_set_is_not_run(tmp_path: Path) -> None:
    """Needs datasets 4, the lowest version that pyproject.toml allows; older ones run it."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "corpus.py").write_text("open('ran', 'w')")
    config = DataSource(type="huggingface", path=str(folder))
    with pytest.raises(ValueError, match=r"data\.path: cannot load .*scripts are no longer"):
        HubTable(config)
    assert [path.name for path in folder.iterdir()] == ["corpus.py"]


# Row 31: the current folder


@pytest.mark.row(31, "Nothing of the current folder is imported")
def test_programs_import_nothing_of_the_current_folder(
    tmp_path: Path, record_result: Callable[[str], None]
) -> None:
    """``tests/reliability/test_inputs.py`` trains in such a folder."""
    folder, run = tmp_path / "folder", tmp_path / "run"
    plant_modules(folder)
    write_checkpoint(run / "checkpoints" / "step-00000001")
    (run / "control").mkdir()
    (run / "control" / "lock").touch()
    environment = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "PYTHONPATH": ":"}
    tool = environment | {"PYTHONPATH": str(ROOT)}
    programs = [
        ([ROOT / "run_train.sh", "--help"], environment),
        ([ROOT / "run_train.sh", "--no.key"], environment),
        ([sys.executable, "-m", "tools.status", run], tool),
        ([sys.executable, "-P", "-m", "tools.generate", run, "--tokens", "1"], tool),
    ]
    for command, variables in programs:
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
        assert "planted" not in done.stderr
        assert done.returncode == (exit_codes.BAD_CONFIG if "--no.key" in command else 0)
        assert imported_modules(folder) == []
    # The modules are seen by a Python that looks for them.
    plain = [sys.executable, "-c", "import tomli"]
    assert b"planted" in subprocess.run(plain, cwd=folder, capture_output=True).stderr
    assert imported_modules(folder) == ["tomli"]
    record_result(f"{len(MODULES)} modules in the folder, {len(programs)} programs: 0 imported")
