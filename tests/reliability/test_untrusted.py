"""Files of others run no code: checkpoints, data sets and run folders. See docs/security.md."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers.models import BPE

from config.job_config import DataSource, Metrics
from data.hub import HubTable
from data.tokenizer import load_tokenizer
from launcher.failures import newest_saved_step, record_failure
from metrics.logger import MetricsLogger
from runtime import exit_codes
from tests.lib.layouts import small_args
from tests.lib.limits import limited_memory
from tests.lib.planted import MODULES, imported_modules, plant_modules
from tests.lib.repository import ROOT
from tests.lib.saved import write_checkpoint
from tools import check_ledger, convert, generate, status

# Row 32: code

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


@pytest.mark.row(32, "A checkpoint's model is imported only if the caller names it")
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


def test_other_code_of_a_checkpoint_is_not_imported(
    tmp_path: Path, planted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables: dict[str, Any] = {"model": {"name": "llama3"}, "optimizer": {"name": OUTSIDE}}
    tables |= {"lr_scheduler": {"decay_type": OUTSIDE}, "validation": {"sources": [OUTSIDE]}}
    tables["data"] = {"tokenizer": "bytes", "source": OUTSIDE, "sources": [{"type": OUTSIDE}]}
    checkpoint = write_checkpoint(tmp_path / "checkpoint", config=tables)
    exported = [str(checkpoint), str(tmp_path / "exported")]
    assert generate.main([str(checkpoint), "--tokens", "2"]) == exit_codes.DONE
    assert convert.main(["export", *exported]) == exit_codes.DONE, capsys.readouterr().err
    assert not planted.exists()


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


# Row 33: the current folder


@pytest.mark.row(33, "Nothing of the current folder is imported")
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
    programs = [
        ([ROOT / "run_train.sh", "--help"], environment),
        ([ROOT / "shardloom", "status", run], environment),
        ([ROOT / "shardloom", "generate", run, "--tokens", "1"], environment),
    ]
    for command, variables in programs:
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
        assert "planted" not in done.stderr
        assert done.returncode == 0, done.stderr
        assert imported_modules(folder) == []
    # The modules are seen by a Python that looks for them.
    plain = [sys.executable, "-c", "import tomli"]
    # run_tests.sh sets it.
    unsafe = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(plain, cwd=folder, env=unsafe, capture_output=True, text=True)
    assert "planted" in done.stderr
    assert "tomli" in imported_modules(folder)
    record_result(f"{len(MODULES)} modules in the folder, {len(programs)} programs: 0 imported")


# Row 36: sizes


def arguments_with(**changed: Any) -> dict[str, Any]:
    return asdict(replace(small_args("llama3", "debugmodel"), vocab_size=264)) | changed


HUGE: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"model_args": arguments_with(n_layers=10**9)}, "tensors for model_args.n_layers"),
    "hidden dim": ({"model_args": arguments_with(hidden_dim=10**9)}, "not [1000000000, 128]"),
    "dim": ({"model_args": arguments_with(dim=2**39, n_heads=2**39)}, "overflow"),
    "heads": ({"model_args": arguments_with(n_heads=2**39)}, "is [128, 128], not ["),
    "sequence": ({"model_args": arguments_with(max_seq_len=10**10)}, "besides its weights"),
    "overflow": (
        {"model_args": arguments_with(max_seq_len=2**39, head_dim=2**39)},
        "TransformerArgs",
    ),
    "beyond": ({"model_args": arguments_with(dim=10**30)}, "model_args.dim: 100000"),
    "negative": (
        {"model_args": arguments_with(n_layers=-1)},
        "model_args.n_layers: -1 is not",
    ),
    "text": ({"model_args": arguments_with(dim="128")}, "model_args.dim: '128' is not"),
    "list": ({"model_args": arguments_with(rope_scaling=[1])}, "rope_scaling: [1] is not a table"),
    "infinite": ({"model_args": arguments_with(rope_theta=float("inf"))}, "rope_theta: inf"),
    "arguments": ({"model_args": [1]}, "model_args is not of type dict"),
    "step": ({"step": "1"}, "step is not of type int"),
    "config": ({"config": {"model": 1}}, "config has a key outside of a table"),
    "vocabulary": (
        {"model_args": arguments_with(vocab_size=64)},
        "is [264, 128], not [64, 128]",
    ),
}


@pytest.mark.row(36, "Sizes from a file are compared with the file before they are used")
def test_sizes_of_a_checkpoint_are_not_believed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], record_result: Callable[[str], None]
) -> None:
    slowest = 0.0
    with limited_memory():
        for name, (metadata, message) in HUGE.items():
            checkpoint = write_checkpoint(tmp_path / name, **metadata)
            begin = time.perf_counter()
            assert generate.main([str(checkpoint)]) == exit_codes.BAD_CONFIG, name
            slowest = max(slowest, time.perf_counter() - begin)
            error = capsys.readouterr().err
            assert error.startswith(str(checkpoint)), name
            assert message in error, name
            folder = str(tmp_path / "exported")
            assert convert.main(["export", str(checkpoint), folder]) == exit_codes.BAD_CONFIG, name
            assert message in capsys.readouterr().err, name
        # The limits do not reject what is right.
        checkpoint = write_checkpoint(tmp_path / "right")
        assert generate.main([str(checkpoint), "--tokens", "2"]) == exit_codes.DONE
    assert slowest < 1.0
    record_result(f"{len(HUGE)} of {len(HUGE)} manifests by name, the slowest in {slowest:.2f} s")


def test_checkpoint_without_a_part_is_rejected_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that is huge, but sparse, is neither read nor hashed."""
    for file in ("manifest.json", "tensors.json", "part-00000.bin"):
        checkpoint = write_checkpoint(tmp_path / file)
        os.truncate(checkpoint / file, 1 << 42)
        assert generate.main([str(checkpoint)]) == exit_codes.BAD_CONFIG
        assert f"{checkpoint / file}" in capsys.readouterr().err


HEADER = {
    "attempt": "a",
    "parent": None,
    "resumed_from": 0,
    "data_after": 0,
    "world_size": 1,
    "rank": 0,
    "dp_rank": 0,
    "n_rows": 1,
    "ramp": [],
}
ENTRY = {"step": 1, "rows": [[0, 0, 0, 0, 5, 1]], "loss": "0x1p0", "grad_norm": "0x1p0"}
DEEP = b"[" * 100_000
LEDGERS: dict[str, list[Any]] = {
    "ranks": [HEADER | {"world_size": 10**12}, ENTRY, ENTRY | {"step": 2}],
    "rows": [HEADER | {"n_rows": 10**12}, ENTRY],
    "ramp": [HEADER | {"ramp": [[10**6, 10**12]]}, ENTRY],
    "no ranks": [HEADER | {"world_size": 0}, ENTRY],
    "types": [HEADER | {"world_size": "1", "attempt": ["a"]}, ENTRY],
    "negative": [HEADER | {"resumed_from": -1}, ENTRY],
    "step": [HEADER, ENTRY | {"step": 10**30}, ENTRY],
    "beyond int64": [HEADER, ENTRY | {"rows": [[10**30] * 6]}, ENTRY],
    "deep": [HEADER, DEEP, ENTRY],
    "no object": [HEADER, [1], ENTRY],
}


@pytest.mark.row(36, "Sizes from a file are compared with the file before they are used")
@pytest.mark.parametrize("name", LEDGERS)
def test_numbers_of_a_ledger_are_not_believed(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ledger").mkdir()
    lines = [x if isinstance(x, bytes) else json.dumps(x).encode() for x in LEDGERS[name]]
    (tmp_path / "ledger" / "rank-00000.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    begin = time.perf_counter()
    assert check_ledger.main([str(tmp_path)]) in (exit_codes.FAILED, exit_codes.DONE)
    assert time.perf_counter() - begin < 1.0
    assert f"{tmp_path}: " in capsys.readouterr().out


LINES: dict[str, bytes] = {
    "deep": DEEP,
    "no object": b"[1]",
    "text": b'{"time": "now", "step": 1}',
    "text for a step": b'{"time": 1.0, "step": "1", "seconds_per_step": 1.0}',
    "list for restarts": b'{"time": 1.0, "step": 1, "restarts": [1]}',
    "huge": b'{"time": 1' + b"0" * 400 + b', "step": 1}',
    "not UTF-8": b'{"time": 1.0, "step": \xff}',
    "no number": b'{"time": 1.0}',
}


@pytest.mark.parametrize("name", LINES)
def test_lines_of_a_run_folder_stop_no_program(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "control").mkdir()
    for file in ("metrics.jsonl", *(f"control/{n}" for n in ("failures", "progress", "lock"))):
        (tmp_path / file).write_bytes(LINES[name] + b"\n")
    (tmp_path / "control" / "outcome").write_text("done\x1b[2J\r12:00:00 forged\n")
    (tmp_path / "config.toml").write_bytes(b"a = " + DEEP)
    assert status.main([str(tmp_path)]) == exit_codes.DONE
    assert "\x1b" not in capsys.readouterr().out
    assert newest_saved_step(tmp_path / "control") == 0
    assert record_failure(tmp_path / "control", lines=["x"], codes={}) == 1
    assert record_failure(tmp_path / "control", lines=["x"], codes={}) == 2
    MetricsLogger(tmp_path, Metrics(trackers=[]), is_writer=True, n_devices=1,
                  device=torch.device("cpu"), flops_per_token=(1.0, 1.0), peak_flops=None,
                  resumed_step=5).close()  # fmt: skip


def test_unassigned_ids_of_a_tokenizer_are_not_allocated(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(BPE(vocab={"<s>": 0, "</s>": 1, "a": 2}, merges=[]))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    path = tmp_path / "tokenizer.json"
    # Written by hand, because the library would count to the id.
    content = json.loads(tokenizer.to_str())
    content["model"]["vocab"]["a"] = 2**31
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=re.escape(f"{path}: the largest id is 2,147,483,648")):
        load_tokenizer(str(path))
