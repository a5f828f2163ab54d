"""Facts about this rank's program that must be equal on all ranks, because they change numbers."""

import hashlib
import os
import platform
import re
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
# Folders of the repository that the trainer never imports.
NOT_TRAINING = {"benchmarks", "tests", "tools"}
# Packages that may be imported after the start, by the name of their distribution.
OPTIONAL = (
    "datasets", "fla-core", "flash-attn", "flash-attn-3", "flash-attn-4", "flash-linear-attention",
    "torchao", "triton",
)  # fmt: skip
# Environment variables of numeric libraries. Most of those that are not listed change no number
# either, but an unknown one may.
NUMERIC = re.compile(
    r"(ATEN|CUBLAS|CUBLASLT|CUDNN|DNNL|FLA|MKL|ONEDNN|TORCH|TORCHDYNAMO|TORCHINDUCTOR|TRITON)_\w+"
    r"|NCCL_(ALGO|PROTO)|NVIDIA_TF32_OVERRIDE|OPENBLAS_CORETYPE|PYTORCH_TUNABLEOP_(ENABLED|TUNING)"
)
# Folders, logs and threads, which nodes may choose for themselves.
NOT_NUMERIC = re.compile(
    r"TORCH_(CPP|DISTRIBUTED_DEBUG|FR|LOGS|NCCL|SHOW|TRACE)\w*"
    r"|\w+_(DIR|DYNAMIC|FILE|HOME|LOGS?|PATH|THREADS|VERBOSE)"
)


def program_facts() -> dict[str, str]:
    """Python, packages, devices, numeric environment variables and source files, by name."""
    has_gpu = torch.cuda.is_available()
    return {
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "kind of device": "GPU" if has_gpu else "CPU",
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(torch.backends.cudnn.version()),
        "NCCL": str(torch.cuda.nccl.version() if has_gpu else None),
        "commit of torch": torch.version.git_version,
        **_packages(),
        **_variables(),
        **{f"file {name}": _digest(path) for name, path in _sources().items()},
    }


def _packages() -> dict[str, str]:
    """Versions of the imported packages, and of those that may be imported later."""
    imported = {name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names
    found = {}
    for name in sorted({name.replace("_", "-") for name in imported} | set(OPTIONAL)):
        try:
            found[f"package {name}"] = metadata.version(name)
        except metadata.PackageNotFoundError:  # a part of the program, or of another package
            continue
    return found


def _variables() -> dict[str, str]:
    return {
        f"environment variable {name}": value
        for name, value in sorted(os.environ.items())
        if NUMERIC.fullmatch(name) and not NOT_NUMERIC.fullmatch(name)
    }


def _sources() -> dict[str, Path]:
    """Source files by name: all of the trainer's, imported or not, and imported ones of the user.

    A user's file, as of ``module:attribute``, is named by its module, wherever it is.
    """
    packages = [init.parent for init in ROOT.glob("*/__init__.py")]
    trainer = [path for path in packages if path.name not in NOT_TRAINING]
    files = [*ROOT.glob("*.py"), *(file for path in trainer for file in path.rglob("*.py"))]
    found = {path.relative_to(ROOT).as_posix(): path for path in sorted(files)}
    known, standard_library = set(found.values()), sysconfig.get_path("stdlib")
    for name, module in sorted(sys.modules.items()):
        file = str(getattr(module, "__file__", None) or "")
        is_package = {"site-packages", "dist-packages"} & set(file.split(os.sep))
        # Thousands of modules are installed ones, which text tells faster than paths.
        if is_package or file.startswith(f"{standard_library}{os.sep}"):
            continue
        path = Path(file)
        if path.suffix == ".py" and path.is_file() and path not in known:
            depth = name.count(".") + 1 + (path.name == "__init__.py")
            found["/".join(path.parts[-depth:])] = path
    return found


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
