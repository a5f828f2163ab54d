"""The root of the repository, its libraries and its Python files."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
LIBRARIES = {
    "config",
    "runtime",
    "models",
    "data",
    "optim",
    "checkpoint",
    "kernels",
    "launcher",
    "metrics",
    "parallelisms",
}


def python_files() -> list[Path]:
    packages = [path.parent for path in ROOT.glob("*/__init__.py")]
    found = [*ROOT.glob("*.py"), *(path for package in packages for path in package.rglob("*.py"))]
    return sorted(path.relative_to(ROOT) for path in found)
