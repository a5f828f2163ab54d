"""Architecture rules: allowed imports between folders, module names, and lengths of functions."""

import ast
import re
import sys
import tomllib
from collections import defaultdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.lib.repository import LIBRARIES, ROOT, python_files

ROOT_FILES = {
    "build_model",
    "forward_backward",
    "generation",
    "cuda_graphs",
    "resume",
    "run_log",
    "run_spec",
    "run_summary",
    "saved_model",
    "train_loop",
    "train_step",
    "validation",
}
# Folders and root files that each one may import, besides itself. A new folder needs a row.
MAY_IMPORT: dict[str, set[str]] = {
    "config": set(),
    "runtime": {"config"},
    "kernels": {"config", "runtime"},
    "models": {"kernels", "runtime"},
    "checkpoint": {"config", "runtime"},
    "data": {"config", "runtime"},
    "metrics": {"config", "runtime"},
    "optim": {"config", "runtime"},
    "parallelisms": {"config", "runtime"},
    "launcher": {"config", "models", "parallelisms", "runtime"},
    "report": {"config", "data", "metrics", "optim", "runtime"},
    "generation": set(),
    "run_spec": LIBRARIES,
    "saved_model": LIBRARIES,
    "cuda_graphs": LIBRARIES,
    "forward_backward": LIBRARIES | {"cuda_graphs"},
    "build_model": LIBRARIES | {"forward_backward", "cuda_graphs", "run_spec"},
    "run_summary": LIBRARIES | {"build_model", "report", "run_spec"},
    "train_step": LIBRARIES | {"build_model", "cuda_graphs", "run_spec"},
    "run_log": LIBRARIES | {"build_model", "run_spec", "train_step", "validation"},
    "resume": LIBRARIES | {"build_model", "run_spec", "train_step"},
    "validation": LIBRARIES | {"forward_backward", "generation", "run_spec"},
    "train_loop": LIBRARIES | ROOT_FILES - {"train_loop"},
    "train": LIBRARIES | ROOT_FILES,
    # Imported by users' own programs.
    "shardloom": set(),
    "planner": LIBRARIES | {"build_model", "run_spec", "train_step"},
    "tools": LIBRARIES | ROOT_FILES | {"planner", "report"},
    "benchmarks": LIBRARIES | ROOT_FILES | {"planner", "shardloom", "tools", "train"},
    "tests": LIBRARIES
    | ROOT_FILES
    | {"benchmarks", "planner", "report", "shardloom", "tools", "train"},
}
# Files of models/ besides *_sharding.py that may import torch.distributed.
MAY_IMPORT_DISTRIBUTED = {"dtensor.py", "model_spec.py"}
# Optional packages, each imported only in the module that wraps it.
HEAVY = {
    "datasets",
    "transformers",
    "wandb",
    "mlflow",
    "trackio",
    "rich",
    "fla",
    "torchao",
    "matplotlib",
    "huggingface_hub",
    "sentencepiece",
    "pynvml",
}


@cache
def imports(source: str) -> list[str]:
    """Every dotted name imported, also inside functions; relative ones start with a dot."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found += [f"{module}.{alias.name}" for alias in node.names]
    return found


def violations(file: Path, source: str) -> list[str]:
    """Imports of ``file`` that are not allowed."""
    package = file.parts[0].removesuffix(".py")
    return [
        f"{file} imports {name}" for name in imports(source) if not is_allowed(file, package, name)
    ]


def is_allowed(file: Path, package: str, name: str) -> bool:
    top = name.partition(".")[0]
    if top == "" or package not in MAY_IMPORT:
        return False
    # What test modules share is in tests/lib.
    if top == "tests" and ".test_" in name:
        return False
    if (package, top) == ("models", "runtime"):
        # The registry imports what a configuration names; model files know no program.
        return file.name == "__init__.py"
    if top in MAY_IMPORT:
        return top == package or top in MAY_IMPORT[package]
    if top in sys.stdlib_module_names:
        return True
    if package == "config":
        return top != "torch"
    if package == "models":
        may_import_distributed = (
            file.name.endswith("_sharding.py") or file.name in MAY_IMPORT_DISTRIBUTED
        )
        return top == "torch" and (
            may_import_distributed or not name.startswith("torch.distributed")
        )
    return True


def module_of(name: str) -> str | None:
    """Module of Shardloom that is or contains ``name``."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:end])
        if path.with_suffix(".py").is_file() or (path / "__init__.py").is_file():
            return ".".join(parts[:end])
    return None


def cycle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_imports_follow_the_table() -> None:
    files = python_files()
    assert Path("train.py") in files
    assert {file.parts[0].removesuffix(".py") for file in files} == set(MAY_IMPORT)
    assert not [text for file in files for text in violations(file, (ROOT / file).read_text())]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("config/loader.py", "import torch"),
        ("config/loader.py", "from runtime.log import logger"),
        ("models/llama3.py", "from parallelisms.fsdp import apply_fsdp"),
        ("models/llama3.py", "import numpy"),
        ("models/llama3.py", "from runtime.log import logger"),
        ("models/transformer.py", "import torch.distributed as dist"),
        ("models/transformer.py", "from torch import distributed"),
        ("parallelisms/fsdp.py", "from models import find_model"),
        ("parallelisms/fsdp.py", "def apply():\n    import models.llama3"),
        ("runtime/log.py", "import metrics"),
        ("checkpoint/states.py", "if TYPE_CHECKING:\n    from models import ModelSpec"),
        ("data/loader.py", "from optim import loss"),
        ("optim/loss.py", "from .grad_norm import clip_grad_norm_"),
        ("metrics/goodput.py", "from . import flops"),
        ("tools/plan.py", "from train import build_on_meta"),
        ("train.py", "from tools import plan"),
        ("data/loader.py", "import tests.lib.ranks"),
        ("tests/test_ramp.py", "from tests.test_train import run"),
        ("tests/lib/launch.py", "from tests.config import test_loader"),
        ("utils/misc.py", "import os"),
    ],
)
def test_forbidden_import_is_found(file: str, source: str) -> None:
    assert len(violations(Path(file), source)) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("models/transformer_sharding.py", "from torch.distributed.tensor import Shard"),
        ("parallelisms/fsdp.py", "from runtime.log import logger\nimport torch.distributed"),
        ("config/loader.py", "import tomli\nfrom config import describe"),
        ("train.py", "from models import find_model"),
        ("tests/test_train.py", "import train"),
    ],
)
def test_allowed_import_is_not_found(file: str, source: str) -> None:
    assert not violations(Path(file), source)


def test_imports_have_no_cycles() -> None:
    graph = {}
    for file in python_files():
        name = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
        found = {module_of(imported) for imported in imports((ROOT / file).read_text())}
        graph[name] = {module for module in found if module is not None} - {name}
    assert graph["build_model"] >= {"run_spec", "parallelisms.parallelize"}
    assert not cycle(graph)
    assert cycle(graph | {"config.job_config": {"train"}})
    assert not cycle(MAY_IMPORT)


def test_heavy_packages_are_imported_in_one_module() -> None:
    importers = defaultdict(set)
    for file in python_files():
        for name in imports((ROOT / file).read_text()):
            if file.parts[0] not in ("tests", "benchmarks") and name.partition(".")[0] in HEAVY:
                importers[name.partition(".")[0]].add(str(file))
    assert all(len(files) == 1 for files in importers.values()), importers


def test_no_module_hides_a_library() -> None:
    """A script's folder comes first on ``sys.path``, so a file name could hide a library."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    required = [text for part in (project["dependencies"], *extras) for text in part]
    libraries = {re.split(r"[^\w-]", text)[0].replace("-", "_") for text in required}
    assert {"datasets", "tokenizers", "torch"} <= libraries
    own = {file.stem for file in python_files()} - {"__init__", "__main__"} | set(MAY_IMPORT)
    assert not own & (sys.stdlib_module_names | libraries | HEAVY)


def test_functions_have_at_most_60_lines() -> None:
    def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
        return (node.end_lineno or node.lineno) - node.lineno + 1

    assert not [
        f"{file}:{node.lineno}: {node.name} has {length(node)} lines"
        for file in python_files()
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and length(node) > 60
    ]
