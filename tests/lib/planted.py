"""A folder with modules whose import leaves a trace."""

from pathlib import Path

# Of the standard library, packages, Shardloom itself, and what Python imports when it starts.
MODULES = (
    *("argparse", "contextlib", "ctypes", "fcntl", "gzip", "json", "logging", "platform", "site"),
    *("sitecustomize", "socket", "struct", "subprocess", "tempfile", "tomllib", "usercustomize"),
    *("uuid", "zlib", "ensurepip", "pip", "venv"),
    *("numpy", "pydantic", "safetensors", "tensorboard", "tomli", "tomli_w", "torch", "xxhash"),
    *("checkpoint", "config", "data", "launcher", "models", "runtime", "tools", "train"),
)
SOURCE = """
import os
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "imported"), "a") as file:
    file.write(__name__ + "\\n")
raise ImportError("planted")
"""


def plant_modules(folder: Path) -> None:
    """Write each of ``MODULES`` to ``folder``, json as a package."""
    folder.mkdir()
    for name in MODULES:
        path = folder / f"{name}.py"
        if name == "json":
            path = folder / name / "__init__.py"
            path.parent.mkdir()
        path.write_text(SOURCE)


def imported_modules(folder: Path) -> list[str]:
    """Names of the modules of ``folder`` that were imported since ``plant_modules``."""
    found = [path for path in folder.rglob("imported") if path.is_file()]
    return [name for path in found for name in path.read_text().split()]
