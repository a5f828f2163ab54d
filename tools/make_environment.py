"""Create an environment with all requirements of the project and print its interpreter.

    make_environment.py [EXTRA]                               installs what this interpreter lacks
    make_environment.py --torch VERSION [--lowest|--newest]   for tests with another PyTorch
    make_environment.py --cuda                                for tests with a CUDA build of PyTorch

If this interpreter has PyTorch, as in most containers, the environment sees its packages, and pip
must not replace any of them. Imports the standard library only.
"""

import argparse
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).absolute().parents[1]
# File in an environment while pip changes it; missing_requirements.py checks for it too.
UNFINISHED = "unfinished"
# File in an environment that names its base interpreter or its requirements.
MADE_OF = "made_of"
# Environments for tests: the lowest or newest of other packages, or a CUDA build of PyTorch.
KINDS = ("lowest", "newest", "cuda")
CONFLICT = "conflicting dependencies"
LIST_PACKAGES = """
import json
from importlib.metadata import distributions
print(json.dumps([(d.name, d.version, str(d.locate_file(""))) for d in distributions()]))
"""
VERSION = re.compile(
    r"(\d+!)?\d+(\.\d+)*([-_.]?(a|b|c|rc|alpha|beta|pre|preview|post|rev|r|dev)[-_.]?\d*)*"
    r"(\+[a-z0-9]+([-_.][a-z0-9]+)*)?",
    re.IGNORECASE,
)


class InstallError(Exception):
    """Failure of venv or pip; the message is their output."""

    def __init__(self, text: str, *, is_killed: bool = False) -> None:
        super().__init__(text)
        self.is_killed = is_killed


def main() -> int:
    arguments = parse_arguments()
    extra, torch = arguments.extra, arguments.torch
    if arguments.cuda and torch is None:
        torch = next(line for line in pinned() if name_of(line) == "torch").partition("==")[2]
    lacks = [f"torch=={torch}"] if torch else missing_requirements(Path(sys.executable), extra)
    try:
        if torch:
            kind = next((name for name in KINDS if getattr(arguments, name)), "")
            folder = test_environment(torch, kind)
        else:
            folder = run_environment(extra, lacks)
    except KeyboardInterrupt:
        return 130
    except (OSError, InstallError) as error:
        log(f"could not install {' '.join(lacks)}: {error}")
        if not torch:
            command = shlex.join([sys.executable, "-m", "pip", "install", *lacks])
            log(f"install them by hand: {command}")
        return 1
    print(python_of(folder))
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make_environment.py")
    parser.add_argument("extra", nargs="?")
    parser.add_argument("--torch")
    others = parser.add_mutually_exclusive_group()
    for kind in KINDS:
        others.add_argument(f"--{kind}", action="store_true")
    arguments = parser.parse_args()
    if arguments.torch is not None and not VERSION.fullmatch(arguments.torch):
        log(f"--torch {arguments.torch!r} is not a version such as 2.11.0")
        sys.exit(2)
    return arguments


def run_environment(extra: str | None, lacks: list[str]) -> Path:
    """Create or find the environment of this interpreter and install what it ``lacks``."""
    if Path(sys.prefix, UNFINISHED).exists():
        maker = Path(sys.base_prefix, "bin", "python{}.{}".format(*sys.version_info))
        is_own = sys.prefix != sys.base_prefix and Path(sys.prefix).parent.samefile(ROOT)
        if is_own and maker.exists():
            # It is active. The interpreter that made it makes it again.
            os.execv(maker, [str(maker), *sys.argv])
        raise InstallError(f"the installation of {sys.prefix} is incomplete; unset PYTHON")
    sees_base = not any(name_of(requirement) == "torch" for requirement in lacks)
    kind = "with" if sees_base else "without"
    base = f"{sys.prefix}, Python {sys.version_info[0]}.{sys.version_info[1]} {kind} torch"
    folder = folder_of(base)
    # A complete environment needs no lock: compute nodes often cannot write to its folder.
    if python_of(folder).exists() and not missing_requirements(python_of(folder), extra):
        return folder
    with locked():
        folder = folder_of(base)
        with removed_on_failure(folder) as is_new:
            if is_new:
                create(folder, sees_base=sees_base)
                (folder / MADE_OF).write_text(base)
            install(folder, extra)
    return folder


def folder_of(base: str) -> Path:
    """Folder for the environment of ``base``; never one that belongs to another interpreter."""
    own = Path(sys.prefix)
    if (own / MADE_OF).exists() and own.parent.samefile(ROOT):
        return own
    usual = ROOT / ".venv"
    is_free = not usual.exists() or (usual / UNFINISHED).exists()
    if is_free or read(usual / MADE_OF) == base:
        return usual
    return ROOT / f".venv-{hashlib.sha256(base.encode()).hexdigest()[:8]}"


def test_environment(torch: str, kind: str) -> Path:
    """Create or find the environment with this PyTorch; its ``kind`` is one of ``KINDS``, or ""."""
    folder = ROOT / f".venv-torch-{torch}{kind and f'-{kind}'}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = project["dependencies"] + project["optional-dependencies"]["test"]
    if kind == "lowest":
        requirements = [requirement.replace(">=", "==") for requirement in requirements]
    # Both bounds in one requirement, so that pip rejects a release that is too old or missing.
    needed = next(r for r in project["dependencies"] if name_of(r) == "torch")
    # Where both are offered, pip would prefer the local version +cpu.
    exact = f"=={torch},!={torch}+cpu" if kind == "cuda" else f"=={torch}"
    requirements = [f"{needed},{exact}", *(r for r in requirements if name_of(r) != "torch")]
    is_pinned = kind in ("", "cuda")
    constraints = [line for line in pinned() if name_of(line) != "torch"] if is_pinned else []
    wanted = "\n".join([*requirements, *constraints])
    if read(folder / MADE_OF) == wanted and not (folder / UNFINISHED).exists():
        return folder
    with locked(), removed_on_failure(folder) as is_new:
        if is_new:
            create(folder, sees_base=False)
        log(f"installing torch=={torch} into {folder} (once, takes minutes)")
        pip_install(folder, requirements, constraints)
        if kind == "cuda":
            check_cuda_build(folder)
        (folder / MADE_OF).write_text(wanted)
    return folder


def check_cuda_build(folder: Path) -> None:
    """Raise ``InstallError`` if pip's configuration chose a PyTorch for CPUs."""
    program = "import torch; print(torch.version.cuda is None, torch.__version__)"
    is_for_cpus, version = run([python_of(folder), "-c", program]).split()
    if is_for_cpus == "True":
        raise InstallError(
            f"pip chose torch {version}, which is not a CUDA build; an index of its configuration"
            " (pip config list) may be for CPUs: try PIP_CONFIG_FILE=/dev/null"
        )


def create(folder: Path, *, sees_base: bool) -> None:
    """Create an environment, empty or with ``sees_base`` on top of this interpreter's packages."""
    folder.mkdir()
    (folder / UNFINISHED).touch()
    # Images often have pip but lack ensurepip, which venv needs to install pip.
    without_pip = sees_base and importlib.util.find_spec("pip") is not None
    options = ["--without-pip"] if without_pip else []
    run([sys.executable, "-m", "venv", *options, folder])
    if sees_base:
        paths = site.getsitepackages()
        if site.ENABLE_USER_SITE:
            paths.append(site.getusersitepackages())
        # Not --system-site-packages: if this interpreter is itself in an environment, that option
        # would show only its base.
        (packages,) = folder.glob("lib/python*/site-packages")
        lines = [f"import site; site.addsitedir({path!a})\n" for path in paths]
        (packages / "base.pth").write_text("".join(lines))
    (folder / UNFINISHED).unlink()


def install(folder: Path, extra: str | None) -> None:
    """Install what the environment lacks; packages of its base keep their versions."""
    lacks = missing_requirements(python_of(folder), extra)
    if not lacks:
        return
    log(f"installing {' '.join(lacks)} into {folder} (once, takes minutes)")
    base = packages_of_base(folder)
    versions = {name: version for name, (version, _) in base.items()}
    pins = [
        f"{name}=={version}" for name, version in versions.items() if VERSION.fullmatch(version)
    ]
    constraints = [line for line in pinned() if name_of(line) not in base]
    try:
        pip_install(folder, lacks, pins + constraints)
    except InstallError as error:
        if not pins or CONFLICT not in str(error):
            raise
        log(
            "constraints.txt conflicts with installed packages; trying pyproject.toml's bounds only"
        )
        pip_install(folder, lacks, pins)
    if still := missing_requirements(python_of(folder), extra):
        raise InstallError(f"pip succeeded, but {' '.join(still)} is missing")
    if "torch" in base:
        log("torch = {} of {}".format(*base["torch"]))


def packages_of_base(folder: Path) -> dict[str, tuple[str, str]]:
    """Version and location of each package that the environment sees in its base."""
    own = folder.resolve()
    found: dict[str, tuple[str, str]] = {}
    for name, version, location in json.loads(run([python_of(folder), "-c", LIST_PACKAGES])):
        if name and version and not Path(location).resolve().is_relative_to(own):
            # Python imports the first one on sys.path.
            found.setdefault(name_of(name), (version, location))
    return found


def pip_install(folder: Path, requirements: list[str], constraints: list[str]) -> None:
    """Install ``requirements``; the environment is marked as unfinished meanwhile."""
    file = folder / "constraints.txt"
    file.write_text("\n".join(constraints))
    (folder / UNFINISHED).touch()
    try:
        run([python_of(folder), "-m", "pip", "install", "--constraint", file, *requirements])
    except InstallError as error:
        # pip rolls back on failure, unless it was killed.
        if not error.is_killed:
            (folder / UNFINISHED).unlink()
        raise
    (folder / UNFINISHED).unlink()


def run(command: list[str | Path]) -> str:
    """Return the stdout of ``command``; raise ``InstallError`` with its errors."""
    environment = os.environ | {"PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    # pip inherits the lock's descriptor, so it holds the lock even if this process is killed.
    done = subprocess.run(
        command, env=environment, close_fds=False, capture_output=True, text=True, errors="replace"
    )
    if done.returncode:
        # pip prints the packages of a conflict on stdout, not on stderr.
        errors = done.stderr[max(0, done.stderr.find("ERROR")) :] or done.stdout
        cause = "".join(done.stdout.partition("\nThe conflict is caused by:")[1:])
        text = f"{errors}{cause}".strip()
        text = f"\n{text}" if text else f"{command[0]} exited with {done.returncode}"
        raise InstallError(text, is_killed=done.returncode < 0)
    return done.stdout


@contextmanager
def locked() -> Iterator[None]:
    """Hold the lock of all environments in ``ROOT``, so that concurrent starts install in turn."""
    with (ROOT / ".venv.lock").open("a") as lock:
        os.set_inheritable(lock.fileno(), True)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log("waiting for the lock: another start is installing")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def removed_on_failure(folder: Path) -> Iterator[bool]:
    """Yield whether the folder must be created; if so, remove it on failure."""
    if (folder / UNFINISHED).exists():
        remove(folder)
    is_new = not folder.exists()
    try:
        yield is_new
    except BaseException as error:
        # A shared file system may have hidden the one that another node made.
        if is_new and not isinstance(error, FileExistsError) and folder.exists():
            remove(folder)
        raise


def remove(folder: Path) -> None:
    """Delete an environment; rename it first, so that its name never holds half of it."""
    doomed = folder.with_name(f"{folder.name}.removed")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def missing_requirements(python: Path, extra: str | None) -> list[str]:
    """Requirements that the interpreter ``python`` lacks."""
    script = ROOT / "tools" / "missing_requirements.py"
    return run([python, script, *([extra] if extra else [])]).split()


def pinned() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if "==" in line]


def name_of(requirement: str) -> str:
    """Normalize a package name: Jinja_2==3.1 to jinja-2."""
    return re.sub(r"[-_.]+", "-", re.split(r"[=>\[]", requirement)[0].lower())


def python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def read(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def log(text: str) -> None:
    # pip quotes names that an index chose.
    shown = "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
    print(f"environment: {shown}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
