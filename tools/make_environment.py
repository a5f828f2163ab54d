"""Make an environment that has what the project needs, and print its interpreter.

    make_environment.py [EXTRA]                               has what this interpreter lacks
    make_environment.py --torch VERSION [--lowest|--newest]   for tests with another PyTorch

If this interpreter has PyTorch, as in most containers, its environment sees all that it has, and
pip may replace nothing of it. Imports the standard library only.
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
# In an environment while pip changes it; missing_requirements.py knows this name too.
UNFINISHED = "unfinished"
# Tells of which interpreter, or of which requirements, an environment was made.
MADE_OF = "made_of"
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
    """venv or pip failed; the text is what they said."""


def main() -> int:
    arguments = parse_arguments()
    extra, torch = arguments.extra, arguments.torch
    lacks = [f"torch=={torch}"] if torch else lacking(Path(sys.executable), extra)
    try:
        if torch:
            folder = environment_for_tests(torch, lowest=arguments.lowest, newest=arguments.newest)
        else:
            folder = environment_for_runs(extra, lacks)
    except KeyboardInterrupt:
        return 130
    except (OSError, InstallError) as error:
        say(f"could not install {' '.join(lacks)}: {error}")
        if not torch:
            command = shlex.join([sys.executable, "-m", "pip", "install", *lacks])
            say(f"this installs them by hand: {command}")
        return 1
    print(python_of(folder))
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make_environment.py")
    parser.add_argument("extra", nargs="?")
    parser.add_argument("--torch")
    others = parser.add_mutually_exclusive_group()
    others.add_argument("--lowest", action="store_true")
    others.add_argument("--newest", action="store_true")
    arguments = parser.parse_args()
    if arguments.torch is not None and not VERSION.fullmatch(arguments.torch):
        say(f"--torch {arguments.torch!r} is not a version such as 2.11.0")
        sys.exit(2)
    return arguments


def environment_for_runs(extra: str | None, lacks: list[str]) -> Path:
    """The environment of this interpreter, with all that it ``lacks``."""
    if Path(sys.prefix, UNFINISHED).exists():
        raise InstallError(f"the installation of {sys.prefix} did not end; unset PYTHON")
    sees_base = not any(name_of(requirement) == "torch" for requirement in lacks)
    kind = "with" if sees_base else "without"
    base = f"{sys.prefix}, Python {sys.version_info[0]}.{sys.version_info[1]} {kind} torch"
    folder = folder_of(base)
    # Compute nodes often cannot write where the environment is.
    if python_of(folder).exists() and not lacking(python_of(folder), extra):
        return folder
    with locked():
        folder = folder_of(base)
        with removed_if_it_fails(folder) as is_new:
            if is_new:
                create(folder, sees_base=sees_base)
                (folder / MADE_OF).write_text(base)
            install(folder, extra)
    return folder


def folder_of(base: str) -> Path:
    """Where the environment of an interpreter is or will be; that of another is never changed."""
    own = Path(sys.prefix)
    if (own / MADE_OF).exists() and own.parent.samefile(ROOT):
        return own
    usual = ROOT / ".venv"
    is_free = not usual.exists() or (usual / UNFINISHED).exists()
    if is_free or read(usual / MADE_OF) == base:
        return usual
    return ROOT / f".venv-{hashlib.sha256(base.encode()).hexdigest()[:8]}"


def environment_for_tests(torch: str, *, lowest: bool, newest: bool) -> Path:
    """The environment with that PyTorch and the lowest, the newest or the pinned other packages."""
    others = "-lowest" if lowest else "-newest" if newest else ""
    folder = ROOT / f".venv-torch-{torch}{others}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = project["dependencies"] + project["optional-dependencies"]["test"]
    if lowest:
        requirements = [requirement.replace(">=", "==") for requirement in requirements]
    # Both bounds in one, so that pip names a release that is too old or that does not exist.
    needed = next(r for r in project["dependencies"] if name_of(r) == "torch")
    requirements = [f"{needed},=={torch}", *(r for r in requirements if name_of(r) != "torch")]
    constraints = [] if others else [line for line in pinned() if name_of(line) != "torch"]
    wanted = "\n".join([*requirements, *constraints])
    if read(folder / MADE_OF) == wanted and not (folder / UNFINISHED).exists():
        return folder
    with locked(), removed_if_it_fails(folder) as is_new:
        if is_new:
            create(folder, sees_base=False)
        say(f"installing torch=={torch} into {folder} (once, some minutes)")
        pip_install(folder, requirements, constraints)
        (folder / MADE_OF).write_text(wanted)
    return folder


def create(folder: Path, *, sees_base: bool) -> None:
    """Create an environment that sees the packages of this interpreter, or has none."""
    folder.mkdir()
    (folder / UNFINISHED).touch()
    # Images often have pip and lack ensurepip, with which venv would install another.
    without_pip = sees_base and importlib.util.find_spec("pip") is not None
    options = ["--without-pip"] if without_pip else []
    run([sys.executable, "-m", "venv", *options, folder])
    if sees_base:
        seen = site.getsitepackages()
        if site.ENABLE_USER_SITE:
            seen.append(site.getusersitepackages())
        # Not --system-site-packages: an environment's environment would see only the former's base.
        (packages,) = folder.glob("lib/python*/site-packages")
        lines = [f"import site; site.addsitedir({path!a})\n" for path in seen]
        (packages / "base.pth").write_text("".join(lines))
    (folder / UNFINISHED).unlink()


def install(folder: Path, extra: str | None) -> None:
    """Install what the environment lacks; what it sees of its base stays as it is."""
    lacks = lacking(python_of(folder), extra)
    if not lacks:
        return
    say(f"installing {' '.join(lacks)} into {folder} (once, some minutes)")
    seen = packages_of_base(folder)
    versions = {name: version for name, (version, _) in seen.items()}
    pins = [
        f"{name}=={version}" for name, version in versions.items() if VERSION.fullmatch(version)
    ]
    ours = [line for line in pinned() if name_of(line) not in seen]
    try:
        pip_install(folder, lacks, pins + ours)
    except InstallError as error:
        if not pins or CONFLICT not in str(error):
            raise
        say("constraints.txt does not fit what is there; trying all that pyproject.toml allows")
        pip_install(folder, lacks, pins)
    if still := lacking(python_of(folder), extra):
        raise InstallError(f"pip ended well, but {' '.join(still)} is missing")
    if "torch" in seen:
        say("torch = {} of {}".format(*seen["torch"]))


def packages_of_base(folder: Path) -> dict[str, tuple[str, str]]:
    """Version and location of each package that the environment sees and that is not in it."""
    own = folder.resolve()
    found: dict[str, tuple[str, str]] = {}
    for name, version, location in json.loads(run([python_of(folder), "-c", LIST_PACKAGES])):
        if name and version and not Path(location).resolve().is_relative_to(own):
            # The first on the path is the one that is imported.
            found.setdefault(name_of(name), (version, location))
    return found


def pip_install(folder: Path, requirements: list[str], constraints: list[str]) -> None:
    """Install, and mark the environment meanwhile."""
    file = folder / "constraints.txt"
    file.write_text("\n".join(constraints))
    (folder / UNFINISHED).touch()
    try:
        run([python_of(folder), "-m", "pip", "install", "--constraint", file, *requirements])
    except InstallError:
        # pip puts back what it had begun to replace.
        (folder / UNFINISHED).unlink()
        raise
    (folder / UNFINISHED).unlink()


def run(command: list[str | Path]) -> str:
    """Return what the command prints; raise ``InstallError`` with its errors."""
    environment = os.environ | {"PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    # The lock's descriptor is inherited: if this process is killed, pip still holds the lock.
    done = subprocess.run(
        command, env=environment, close_fds=False, capture_output=True, text=True, errors="replace"
    )
    if done.returncode:
        # pip names a conflict's packages among what it prints, not among its errors.
        errors = done.stderr[max(0, done.stderr.find("ERROR")) :] or done.stdout
        cause = "".join(done.stdout.partition("\nThe conflict is caused by:")[1:])
        told = f"{errors}{cause}".strip()
        raise InstallError(f"\n{told}" if told else f"{command[0]} ended with {done.returncode}")
    return done.stdout


@contextmanager
def locked() -> Iterator[None]:
    """Hold the lock of all environments here; several starts at once install one by one."""
    with (ROOT / ".venv.lock").open("a") as lock:
        os.set_inheritable(lock.fileno(), True)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another start, which installs")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def removed_if_it_fails(folder: Path) -> Iterator[bool]:
    """Whether the folder is new or to be made anew; if so, nothing is left of it on failure."""
    if (folder / UNFINISHED).exists():
        remove(folder)
    is_new = not folder.exists()
    try:
        yield is_new
    except BaseException:
        if is_new and folder.exists():
            remove(folder)
        raise


def remove(folder: Path) -> None:
    """Remove an environment; none that is half removed has its name."""
    doomed = folder.with_name(f"{folder.name}.removed")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def lacking(python: Path, extra: str | None) -> list[str]:
    """The requirements that an interpreter lacks."""
    script = ROOT / "tools" / "missing_requirements.py"
    return run([python, script, *([extra] if extra else [])]).split()


def pinned() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if "==" in line]


def name_of(requirement: str) -> str:
    """The normalized name of a package: Jinja_2==3.1 to jinja-2."""
    return re.sub(r"[-_.]+", "-", re.split("[=>]", requirement)[0].lower())


def python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def read(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def say(text: str) -> None:
    print(f"environment: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
