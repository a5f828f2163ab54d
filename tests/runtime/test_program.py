"""Facts that ranks compare cover what changes numbers, and nothing that nodes choose themselves."""

import os
import sys
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from unittest.mock import patch

import numpy as np
import pytest
import torch

from runtime import program
from runtime.program import program_facts
from tests.lib.repository import ROOT, python_files


@pytest.mark.parametrize(
    ("name", "is_compared"),
    [
        ("NVIDIA_TF32_OVERRIDE", True),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", True),
        ("CUBLAS_WORKSPACE_CONFIG", True),
        ("CUBLASLT_WORKSPACE_SIZE", True),
        ("ATEN_CPU_CAPABILITY", True),
        ("MKL_CBWR", True),
        ("ONEDNN_DEFAULT_FPMATH_MODE", True),
        ("DNNL_MAX_CPU_ISA", True),
        ("OPENBLAS_CORETYPE", True),
        ("TORCHINDUCTOR_MAX_AUTOTUNE", True),
        ("FLA_USE_FAST_OPS", True),
        ("NCCL_ALGO", True),
        ("OMP_NUM_THREADS", False),
        ("MKL_NUM_THREADS", False),
        ("NVIDIA_VISIBLE_DEVICES", False),
        ("CUDA_VISIBLE_DEVICES", False),
        ("TORCH_LOGS", False),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", False),
        ("TORCH_FR_DUMP_TEMP_FILE", False),
        ("TORCHELASTIC_ERROR_FILE", False),
        ("TORCHINDUCTOR_CACHE_DIR", False),
        ("TRITON_CACHE_DIR", False),
        ("NCCL_SOCKET_IFNAME", False),
        ("HF_TOKEN", False),
        ("WANDB_API_KEY", False),
    ],
)
def test_numeric_environment_variables_are_compared(name: str, is_compared: bool) -> None:
    with patch.dict(os.environ, {name: "1"}):
        assert (f"environment variable {name}" in program_facts()) == is_compared


def test_every_file_that_a_run_may_import_is_compared(tmp_path: Path) -> None:
    compared = {key.removeprefix("file ") for key in program_facts() if key.startswith("file ")}
    folders = ("benchmarks", "tests", "tools")
    files = {f.as_posix() for f in python_files() if f.parts[0] not in folders}
    assert compared >= files
    # Imported above; no module of the standard library or of an installed package.
    others = {name for name in compared - files if not (ROOT / name).is_file()}
    assert not {name for name in others if name.startswith(("torch/", "os.py", "numpy/"))}


def test_modules_of_the_user_are_named_by_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for text in ("a = 1\n", "a = 2\n"):
        folder = tmp_path / str(len(found))
        (folder / "their_models").mkdir(parents=True)
        for name in ("__init__.py", "large.py"):
            (folder / "their_models" / name).write_text(text if name == "large.py" else "")
        for name in [name for name in sys.modules if name.startswith("their_models")]:
            monkeypatch.delitem(sys.modules, name)
        with monkeypatch.context() as context:
            context.syspath_prepend(folder)
            resolve_name("their_models.large")
        found.append(program_facts())
    changed = [key for key in found[0] if found[0][key] != found[1][key]]
    assert changed == ["file their_models/large.py"]
    assert "file their_models/__init__.py" in found[0]


def test_versions_are_those_in_use() -> None:
    facts = program_facts()
    assert facts["package torch"] == version("torch")
    assert facts["package numpy"] == np.__version__
    assert facts["package tomli-w"]
    assert facts["kind of device"] == ("GPU" if torch.cuda.is_available() else "CPU")
    with patch.object(program, "OPTIONAL", ("no-such-package",)):
        assert "package no-such-package" not in program_facts()
