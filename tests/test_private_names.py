"""Only two files of ``runtime`` use private names of PyTorch."""

import ast
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.private_names import PRIVATE
from tests.lib.repository import LIBRARIES, ROOT, python_files

ALLOWED_FILES = (Path("runtime/private_names.py"), Path("runtime/compat.py"))
# Documented private names of the standard library and of tiktoken.
DOCUMENTED = {
    *("_asdict", "_current_frames", "_exit", "_replace"),
    *("_mergeable_ranks", "_pat_str", "_special_tokens"),
}


def is_private(dotted: str) -> bool:
    return any(part.startswith("_") and part[:2] != "__" for part in re.split("[.:]", dotted))


def defined_names(trees: dict[Path, ast.Module]) -> set[str]:
    """Private names that Shardloom defines: functions, classes, arguments, variables, fields."""
    found = set()
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
            found |= {node.attr} if is_own else set()
    return found


def violations(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """Yield private names in ``tree`` that are neither in ``own`` nor keys of ``PRIVATE``."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("torch")]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            text = ast.unparse(node)
            # A method that PyTorch calls, or a private name of PyTorch.
            is_foreign = text.startswith(("super()", "torch.")) or node.attr not in own
            names = [node.attr] if is_foreign and node.attr not in DOCUMENTED else []
        elif isinstance(node, ast.keyword):
            names = [node.arg] if node.arg is not None and node.arg not in own else []
        elif isinstance(node, ast.Constant) and str(node.value).startswith("torch"):
            is_path = re.fullmatch(r"torch[\w.:]*", str(node.value))
            names = [node.value] if is_path and node.value not in PRIVATE else []
        line = getattr(node, "lineno", 0)
        yield from (f"{name} in line {line}" for name in names if is_private(name))


def test_no_other_file_uses_private_names() -> None:
    files = [file for file in python_files() if file.parts[0] != "tests"]
    trees = {file: ast.parse((ROOT / file).read_text()) for file in files}
    own = defined_names(trees)
    found = {file: list(violations(tree, own)) for file, tree in trees.items()}
    assert all(found.pop(file) for file in ALLOWED_FILES)
    assert not {str(file): names for file, names in found.items() if names}


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "import torch._inductor.config as config",
        "from torch.distributed._tensor import DTensor",
        "from torch.distributed.tensor.placement_types import _StridedShard",
        "torch._foreach_norm(parts)",
        "weight._local_tensor",
        "optimizer._init_group(group)",
        "options._threads = 1",
        "super()._ours()",
        "restore(_raise_warn=False)",
        "find('torch:_no_such_name')",
        "getLogger('torch._dynamo')",
    ],
)
def test_private_name_is_found(source: str) -> None:
    assert list(violations(ast.parse(source), {"_ours"}))


@pytest.mark.parametrize(
    "source",
    [
        "from torch.distributed.tensor import DTensor",
        "self._ours = other._ours",
        "find('torch:_foreach_norm')",
        "state._replace(step=1)",
        "torch.__version__",
        "build(_ours=1)",
    ],
)
def test_own_or_public_name_is_not_found(source: str) -> None:
    assert not list(violations(ast.parse(source), {"_ours"}))


# They import optional packages, and their classes have no base.
OPTIONAL = {"mlflow_tracker", "trackio_tracker", "wandb_tracker"}


def test_no_class_overrides_private_methods_of_pytorch() -> None:
    """A new PyTorch release may stop calling it, or start to."""
    found = []
    for file in python_files():
        if file.parts[0] not in LIBRARIES | {"tools"} or file.stem in OPTIONAL | {"__main__"}:
            continue
        module = pkgutil.resolve_name(".".join(file.with_suffix("").parts))
        for cls in vars(module).values():
            if not inspect.isclass(cls) or cls.__module__ != module.__name__:
                continue
            inherited = {
                name
                for base in cls.__mro__[1:]
                if base.__module__.startswith("torch")
                for name in vars(base)
            }
            own = {name for name, value in vars(cls).items() if inspect.isfunction(value)}
            found += [f"{cls.__name__}.{name}" for name in own & inherited if is_private(name)]
    assert not found
