"""No file of Shardloom executes data as code: no pickle, no eval, no shell.

Most checks are ruff rules in ``pyproject.toml``; this file has those that ruff lacks.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lib.repository import ROOT, python_files

# Safe values of arguments that can make a function execute what it reads.
SAFE_ARGUMENTS = {"weights_only": True, "allow_pickle": False, "trust_remote_code": False}
# Without these arguments DCP falls back to a reader or writer of pickles.
NEEDED_ARGUMENTS = {
    "torch.distributed.checkpoint.load": "storage_reader",
    "torch.distributed.checkpoint.save": "storage_writer",
    "torch.distributed.checkpoint.async_save": "storage_writer",
}
# Functions that import what a name says, and the files that may call them: with names that the
# caller gave, in a configuration or on the command line, never with names from other files.
IMPORTING = {
    "models.find_model": {
        "launcher/launch.py",
        "run_spec.py",
        "tools/import_config.py",
        "tools/torchtitan/parallelism.py",
    },
    "models.find_spec": {"saved_model.py"},
    "pkgutil.resolve_name": {"runtime/compat.py", "runtime/outside.py"},
    "runtime.outside.import_attribute": {
        "data/outside.py",
        "models/__init__.py",
        "optim/outside.py",
        "optim/schedule.py",
    },
    "runpy.run_path": set[str](),
    "runpy.run_module": set[str](),
}


def ruff_findings(folder: Path) -> list[str]:
    """Findings of ruff with the project's security rules."""
    command = [sys.executable, "-m", "ruff", "check", "--output-format", "concise", "--no-cache"]
    config = ["--config", str(ROOT / "pyproject.toml")]
    done = subprocess.run([*command, *config, "."], cwd=folder, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return [line for line in done.stdout.splitlines() if re.search(r": (TID251|S\d{3}) ", line)]


def dangerous_calls(file: str, source: str) -> Iterator[str]:
    """Yield dangerous calls that ruff does not detect."""
    tree = ast.parse(source)
    origins = dict(_origins(tree))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        first, _, rest = ast.unparse(node.func).partition(".")
        name = ".".join([origins.get(first, first), *[rest] * bool(rest)])
        where = f"{file}:{node.lineno}: {name}"
        arguments = {keyword.arg: keyword.value for keyword in node.keywords}
        for argument in SAFE_ARGUMENTS.keys() & arguments.keys():
            value = arguments[argument]
            if not isinstance(value, ast.Constant) or value.value is not SAFE_ARGUMENTS[argument]:
                yield f"{where} with {argument}={ast.unparse(value)}"
        if NEEDED_ARGUMENTS.get(name) not in (None, *arguments):
            yield f"{where} without {NEEDED_ARGUMENTS[name]}"
        if name in ("__import__", "builtins.__import__"):
            yield f"{where} hides what is imported"
        if name in IMPORTING and file not in IMPORTING[name]:
            yield f"{where} imports what a name says"


def _origins(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield each imported name with its full dotted name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.asname, alias.name) for alias in node.names if alias.asname)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


@pytest.mark.row(26, "No shell, no pickle, no eval")
def test_no_file_has_dangerous_calls(record_result: Callable[[str], None]) -> None:
    files = python_files()
    assert {Path("train.py"), Path("checkpoint/tensor_files.py"), Path("launcher/launch.py")} <= {
        *files
    }
    assert not [
        text
        for file in files
        for text in dangerous_calls(str(file), (ROOT / file).read_text())
        if file.parts[0] not in ("tests", "benchmarks") or "imports what" not in text
    ]
    assert not ruff_findings(ROOT)
    record_result(f"{len(files)} files, 0 findings")


DANGEROUS = [
    "import pickle",
    "from pickle import loads",
    "import pickle as p",
    "def read():\n    from _pickle import Unpickler",
    "import dill",
    "import cloudpickle",
    "import joblib",
    "import shelve",
    "import marshal",
    "import yaml",
    "import torch\ntorch.load(path, weights_only=True)",
    "from torch import load",
    "import torch as t\nt.load(path)",
    "from torch.serialization import load",
    "import torch.hub",
    "import torch\ntorch.jit.load(path)",
    "from torch.distributed.checkpoint import FileSystemReader",
    "import torch.distributed.checkpoint as dcp\ndcp.FileSystemWriter(path)",
    "from torch.distributed.checkpoint.format_utils import dcp_to_torch_save",
    "import torch.distributed.checkpoint as dcp\ndcp.load(state)",
    "import torch.distributed.checkpoint as dcp\ndcp.save(state, checkpoint_id=path)",
    "from torch.distributed import checkpoint\ncheckpoint.async_save(state)",
    "from torch.distributed.checkpoint import load as read\nread(state)",
    "read(path, weights_only=False)",
    "read(path, weights_only=is_safe)",
    "np.load(path, allow_pickle=True)",
    "load_dataset(path, trust_remote_code=True)",
    "eval(text)",
    "exec(text)",
    "import builtins\nbuiltins.eval(text)",
    "__import__(name)",
    "import importlib\nimportlib.import_module(name)",
    "import pkgutil\npkgutil.resolve_name(name)",
    "from models import find_spec\nfind_spec(name)",
    "import models\nmodels.find_model(name, flavor)",
    "import runpy\nrunpy.run_path(path)",
    "import os\nos.system(text)",
    "import os\nos.popen(text)",
    "import subprocess\nsubprocess.run(text, shell=True)",
    "import subprocess\nsubprocess.getoutput(text)",
    "from subprocess import Popen\nPopen(text, shell=True)",
    "start(text, shell=True)",
    "import tempfile\ntempfile.mktemp()",
]


SAFE = [
    "import torch.distributed.checkpoint as dcp\ndcp.load(state, storage_reader=Reader())",
    "read(path, weights_only=True, allow_pickle=False)",
    'import subprocess\nsubprocess.run(["ls", text])',
    "model.eval()",
    "import json\njson.loads(text)",
    "import importlib.util",
]


def test_exactly_the_dangerous_sources_are_found(tmp_path: Path) -> None:
    sources = {f"planted{number}.py": text for number, text in enumerate(DANGEROUS + SAFE)}
    for file, source in sources.items():
        (tmp_path / file).write_text(source)
    found = ruff_findings(tmp_path)
    found += [text for file, source in sources.items() for text in dangerous_calls(file, source)]
    seen = {text.partition(":")[0] for text in found}
    assert [source for file, source in sources.items() if file in seen] == DANGEROUS


def test_only_attack_tests_may_import_pickle(tmp_path: Path) -> None:
    for folder in ("tests/reliability", "tests/data", "data"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "planted.py").write_text("import pickle")
    found = sorted(text.partition(":")[0] for text in ruff_findings(tmp_path))
    assert found == ["data/planted.py", "tests/data/planted.py"]
