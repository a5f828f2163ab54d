"""Private names of PyTorch are in two files of ``runtime`` and nowhere else."""

import ast
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.private_names import PRIVATE
from tests.test_import_rules import LIBRARIES, ROOT, our_files

DOORS = (Path("runtime/private_names.py"), Path("runtime/compat.py"))
# Of the standard library and of tiktoken, whose documentation has them.
OF_OTHERS = {
    *("_asdict", "_current_frames", "_exit", "_replace"),
    *("_mergeable_ranks", "_pat_str", "_special_tokens"),
}


def is_private(dotted: str) -> bool:
    return any(part.startswith("_") and part[:2] != "__" for part in re.split("[.:]", dotted))


def defined(trees: dict[Path, ast.Module]) -> set[str]:
    """Private names of our own: functions, classes, arguments, variables, attributes of self."""
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


def violations(tree: ast.Module, ours: set[str]) -> Iterator[str]:
    """What of ``tree`` is a private name that is neither ours nor a key of ``PRIVATE``."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("torch")]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            # PyTorch would call it, or we PyTorch's.
            is_foreign = text.startswith(("super()", "torch.")) or node.attr not in ours
            names = [node.attr] if is_foreign and node.attr not in OF_OTHERS else []
        elif isinstance(node, ast.keyword):
            names = [node.arg] if node.arg is not None and node.arg not in ours else []
        elif isinstance(node, ast.Constant) and str(node.value).startswith("torch"):
            is_path = re.fullmatch(r"torch[\w.:]*", str(node.value))
            names = [node.value] if is_path and node.value not in PRIVATE else []
        yield from (f"{name} in line {node.lineno}" for name in names if is_private(name))


def test_no_other_file_knows_a_private_name() -> None:
    files = [file for file in our_files() if file.parts[0] != "tests"]
    trees = {file: ast.parse((ROOT / file).read_text()) for file in files}
    ours = defined(trees)
    found = {file: list(violations(tree, ours)) for file, tree in trees.items()}
    assert all(found.pop(door) for door in DOORS)
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
def test_a_private_name_is_seen(source: str) -> None:
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
def test_what_is_ours_or_public_is_not_seen(source: str) -> None:
    assert not list(violations(ast.parse(source), {"_ours"}))


def test_no_class_of_ours_replaces_a_private_method_of_pytorchs() -> None:
    """A base class would call it, or no longer."""
    found = []
    for file in our_files():
        if file.parts[0] not in LIBRARIES | {"tools"} or file.stem == "__main__":
            continue
        module = pkgutil.resolve_name(".".join(file.with_suffix("").parts))
        for cls in vars(module).values():
            if not inspect.isclass(cls) or cls.__module__ != module.__name__:
                continue
            theirs = {
                name
                for base in cls.__mro__[1:]
                if base.__module__.startswith("torch")
                for name in vars(base)
            }
            ours = {name for name, value in vars(cls).items() if inspect.isfunction(value)}
            found += [f"{cls.__name__}.{name}" for name in ours & theirs if is_private(name)]
    assert not found
