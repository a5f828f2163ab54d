"""Environments keep the PyTorch of an image and are never used half installed.

The tests run real interpreters and a real pip, in a clone whose requirements are tiny wheels.
"""

import ctypes
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import time
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.lib.patience import PATIENCE_SECONDS
from tests.lib.planted import imported_modules, plant_modules
from tests.lib.repository import ROOT
from tools import make_environment

IMAGE_TORCH = "2.12.0a0+5ff8b4a.nv26.05"
PROJECT = """
[project]
dependencies = ["torch>=2.11", "numpy>=2.0", "small-one>=1.0"]
optional-dependencies = { test = ["pytest>=8.0"] }
"""
CONSTRAINTS = "# Exact versions\nnumpy==2.4\npytest==8.1\nsmall_one==1.2\ntorch==2.13.0\n"
SCRIPTS = ["run_train.sh", "run_tests.sh", "shardloom"]
TOOLS = ["find_python.sh", "make_environment.py", "missing_requirements.py"]
PYTEST = """
import os, sys
print(os.environ["PYTHON"] == sys.executable, os.environ["OMP_NUM_THREADS"], *sys.argv[1:])
"""
PACKAGES = """
import json
from importlib.metadata import distributions
print(json.dumps({d.name: [d.version, str(d.locate_file(""))] for d in distributions()}))
"""
FIND = 'source tools/find_python.sh; find_python "$@"; echo "$PYTHON"'


class Clone:
    """A fresh clone with a package index beside it."""

    def __init__(self, folder: Path) -> None:
        self.root, self.wheels = folder / "the clone", folder / "wheels"
        self.venv = self.root / ".venv"
        (self.root / "tools").mkdir(parents=True)
        self.wheels.mkdir()
        for name in [*SCRIPTS, *(f"tools/{name}" for name in TOOLS)]:
            shutil.copy(ROOT / name, self.root / name)
        (self.root / "pyproject.toml").write_text(PROJECT)
        (self.root / "constraints.txt").write_text(CONSTRAINTS)
        # Versions that pip would install if it did not keep the image's.
        for name, version in [("torch", "2.13.0"), ("numpy", "2.4"), ("pytest", "8.1")]:
            write_wheel(self.wheels, name, version)

    def start(
        self, *command: str | Path, cwd: Path | None = None, **environment: str | Path
    ) -> subprocess.Popen[str]:
        pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": self.wheels, "PIP_CONFIG_FILE": os.devnull}
        return subprocess.Popen(
            command,
            cwd=cwd or self.root,
            env={"PATH": os.environ["PATH"], **pip, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=obey_permissions,
        )

    def find(self, *arguments: str, **environment: str | Path) -> tuple[int, str, str]:
        """Run find_python; return its exit code, the interpreter and its messages."""
        process = self.start("bash", "-euc", FIND, "bash", *arguments, **environment)
        found, messages = process.communicate(timeout=PATIENCE_SECONDS)
        return process.returncode, found.strip(), messages


def obey_permissions() -> None:
    """Drop the capability that lets root write anywhere (Linux's PR_CAPBSET_DROP)."""
    if os.geteuid() == 0:
        ctypes.CDLL(None).prctl(24, 1)


def write_wheel(folder: Path, name: str, version: str, *requires: str, source: str = "") -> Path:
    stem = f"{name.replace('-', '_')}-{version}"
    lines = [f"Requires-Dist: {requirement}" for requirement in requires]
    files = {
        f"{name.replace('-', '_')}.py": source,
        f"{stem}.dist-info/METADATA": "\n".join(
            ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines, ""]
        ),
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{stem}.dist-info/RECORD"
    files[record] = "".join(f"{path},,\n" for path in [*files, record])
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel


def site_packages(folder: Path) -> Path:
    return next(folder.glob("lib/python*/site-packages"))


def make_image(folder: Path, **versions: str) -> Path:
    """Create an image with these packages and pip; return its interpreter."""
    venv.create(folder)
    packages = site_packages(folder)
    spec = importlib.util.find_spec("pip")
    assert spec is not None
    assert spec.origin is not None
    pip = Path(spec.origin).parent
    for path in [pip, *pip.parent.glob("pip-*.dist-info")]:
        (packages / path.name).symlink_to(path)
    for name, version in versions.items():
        zipfile.ZipFile(write_wheel(folder, name, version)).extractall(packages)
    return folder / "bin" / "python"


def packages_of(python: str | Path) -> dict[str, tuple[str, str]]:
    """Version and folder of all packages that an interpreter sees, except pip."""
    done = subprocess.run([python, "-c", PACKAGES], capture_output=True, text=True, check=True)
    return {name: tuple(facts) for name, facts in json.loads(done.stdout).items() if name != "pip"}


def assert_fails(clone: Clone, result: tuple[int, str, str], *names: str) -> None:
    code, _, messages = result
    assert code == 1
    assert "Traceback" not in messages
    for name in [*names, "-m pip install 'small-one>=1.0'"]:
        assert name in messages
    assert [path.name for path in clone.root.glob(".venv*") if path.is_dir()] == []


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    clone = Clone(tmp_path)
    write_wheel(clone.wheels, "small-one", "1.2", "numpy")
    return clone


@pytest.fixture
def image(tmp_path: Path) -> Path:
    return make_image(tmp_path / "the image", torch=IMAGE_TORCH, numpy="2.1")


def test_image_packages_are_kept_and_missing_ones_added(clone: Clone, image: Path) -> None:
    write_wheel(clone.wheels, "small-one", "1.3")
    before = packages_of(image)
    path = f"{image.parent}:{os.environ['PATH']}"
    code, python, messages = clone.find(PATH=path)
    assert (code, python) == (0, str(clone.venv / "bin" / "python")), messages
    own = str(site_packages(clone.venv))
    assert packages_of(python) == {**before, "small-one": ("1.2", own)}
    assert packages_of(image) == before
    torch = f"torch = {IMAGE_TORCH} of {site_packages(image.parents[1])}"
    assert [line for line in messages.splitlines() if "torch" in line] == [f"environment: {torch}"]
    assert clone.find(PATH=path) == (0, python, "")
    # An extra goes into the same environment.
    assert clone.find("test", PATH=path)[:2] == (0, python)
    assert packages_of(python)["pytest"] == ("8.1", own)


def test_constraints_yield_to_image_and_conflict_is_named(clone: Clone, image: Path) -> None:
    write_wheel(clone.wheels, "small-one", "1.2", "numpy>=2.4")
    result = clone.find(PYTHON=image)
    assert_fails(clone, result, "numpy==2.1", "numpy>=2.4", "small-one 1.2")
    write_wheel(clone.wheels, "small-one", "1.1")
    code, python, _ = clone.find(PYTHON=image)
    assert code == 0
    versions = {name: version for name, (version, _) in packages_of(python).items()}
    assert versions == {"torch": IMAGE_TORCH, "numpy": "2.1", "small-one": "1.1"}


def test_failed_install_prints_the_pip_command(clone: Clone, image: Path) -> None:
    no_index = {"PYTHON": image, "PIP_FIND_LINKS": clone.root}
    assert_fails(clone, clone.find(**no_index), "small-one>=1.0")
    (clone.root / ".venv.lock").unlink()
    clone.root.chmod(0o555)
    assert_fails(clone, clone.find(PYTHON=image), "small-one>=1.0", ".venv.lock")
    clone.root.chmod(0o755)
    assert clone.find(PYTHON=image)[0] == 0
    # A complete environment needs no write access.
    (clone.root / ".venv.lock").unlink()
    clone.root.chmod(0o555)
    assert clone.find(**no_index)[0] == 0
    clone.root.chmod(0o755)


def test_killed_installation_is_repeated(clone: Clone, image: Path) -> None:
    killed = clone.start("bash", "-c", FIND, PYTHON=image)
    while not (clone.venv / "constraints.txt").exists() or not (clone.venv / "unfinished").exists():
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    # A half-finished pip can leave files that make a package look installed.
    half = write_wheel(clone.root, "small-one", "1.9")
    zipfile.ZipFile(half).extractall(site_packages(clone.venv))
    # It is active, as in a shell that had activated an older one.
    path = os.pathsep.join([str(clone.venv / "bin"), os.environ["PATH"]])
    code, python, messages = clone.find(PATH=path, VIRTUAL_ENV=clone.venv)
    assert code == 0, messages
    assert packages_of(python)["small-one"][0] == "1.2"


@pytest.mark.row(33, "Nothing of the current folder is imported")
def test_installation_imports_nothing_of_the_current_folder(
    clone: Clone, image: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    plant_modules(folder)
    script = f'source "{clone.root}/tools/find_python.sh"; find_python; echo "$PYTHON"'
    # Each empty entry stands for the current folder, and CDPATH must not lead elsewhere.
    variables = {"PYTHON": image, "PYTHONPATH": "::", "CDPATH": folder}
    process = clone.start("bash", "-euc", script, cwd=folder, **variables)
    found, messages = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, messages
    assert found.strip() == str(clone.venv / "bin" / "python")
    assert packages_of(found.strip())["small-one"][0] == "1.2"
    assert imported_modules(folder) == []


def test_concurrent_starts_install_once(clone: Clone, image: Path) -> None:
    both = [clone.start("bash", "-euc", FIND, PYTHON=image) for _ in range(2)]
    results = [process.communicate(timeout=PATIENCE_SECONDS) for process in both]
    assert [process.returncode for process in both] == [0, 0], results
    assert {found.strip() for found, _ in results} == {str(clone.venv / "bin" / "python")}
    assert "".join(messages for _, messages in results).count("environment: installing") == 1


def test_named_interpreter_wins_over_other_environment(
    clone: Clone, image: Path, tmp_path: Path
) -> None:
    other = make_image(tmp_path / "other", torch="2.14.0", numpy="2.3")
    first, second = (Path(clone.find(PYTHON=python)[1]) for python in (image, other))
    assert first == clone.venv / "bin" / "python"
    assert packages_of(first)["torch"][0] == IMAGE_TORCH
    assert packages_of(second)["torch"][0] == "2.14.0"
    assert [clone.find(PYTHON=python)[1] for python in (image, other)] == [str(first), str(second)]


def write_program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_named_interpreter_that_cannot_run_ends_the_script(clone: Clone, tmp_path: Path) -> None:
    """Another interpreter would train with other packages than those that the user chose."""
    (tmp_path / "text").write_text("#!/bin/sh\n")
    reasons = {
        tmp_path / "absent": "No such file",
        tmp_path: "directory",
        tmp_path / "text": "Permission denied",
        "no-such-python": "not found",
        "python3 -u": "not found",
        "~/python": "No such file",
        "false": "exits with 1",
        "echo": "-c",
        write_program(tmp_path / "old", "#!/bin/sh\necho 'it is 3.9' >&2\nexit 1\n"): "it is 3.9",
        write_program(tmp_path / "broken", "#!/no/interpreter\n"): "broken: ",
    }
    for python, reason in reasons.items():
        # An active environment is no substitute.
        code, found, messages = clone.find(PYTHON=python, VIRTUAL_ENV=tmp_path)
        assert (code, found) == (2, ""), python
        assert len(messages.splitlines()) == 1, messages
        assert messages.startswith(f"PYTHON={python}: ")
        assert reason in messages
        assert "set PYTHON to Python 3.11 or newer" in messages
    assert not clone.venv.exists()


def test_interpreters_that_lack_torch_are_named(clone: Clone, image: Path, tmp_path: Path) -> None:
    bare = make_image(tmp_path / "bare")
    path = f"{image.parent}:{os.environ['PATH']}"
    code, python, messages = clone.find(PYTHON=bare, PATH=path)
    assert code == 0, messages
    (line,) = (line for line in messages.splitlines() if "because" in line)
    lacks = "torch>=2.11, numpy>=2.0, small-one>=1.0"
    assert line == f"environment: {python}, because PYTHON={bare} lacks {lacks}"
    # An active environment without PyTorch is passed over, but not silently.
    active = {"VIRTUAL_ENV": bare.parents[1], "CONDA_PREFIX": tmp_path / "absent", "PATH": path}
    shutil.rmtree(clone.venv)
    code, python, messages = clone.find(**active)
    assert code == 0
    assert packages_of(python)["torch"][0] == IMAGE_TORCH
    named = [line for line in messages.splitlines() if "is not used" in line]
    assert len(named) == 2
    assert str(bare) in named[0]
    assert "it lacks torch>=2.11" in named[0]
    assert "No such file" in named[1]
    # One with all packages needs no word.
    assert clone.find(PYTHON=python) == (0, python, "")


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_find_their_folder_through_symlinks(
    clone: Clone, tmp_path: Path, script: str
) -> None:
    stub = tmp_path / "python"
    stub.write_text('#!/bin/sh\ncase "$1" in *missing*) ;; *) echo "$PYTHONPATH" ;; esac\n')
    stub.chmod(0o755)
    bin_folder = tmp_path / "my bin"
    bin_folder.mkdir()
    (bin_folder / "absolute").symlink_to(clone.root / script)
    (bin_folder / "relative").symlink_to(Path("..", "the clone", script))
    (bin_folder / "twice").symlink_to("relative")
    (tmp_path / "folder").symlink_to(bin_folder)
    (bin_folder / "through").symlink_to(tmp_path / "folder" / "twice")
    for link in ["absolute", "relative", "twice", "through"]:
        stdout, errors = clone.start(bin_folder / link, PYTHON=stub).communicate(
            timeout=PATIENCE_SECONDS
        )
        roots = {Path(line).resolve() for line in stdout.splitlines()}
        assert roots == {clone.root.resolve()}, f"{link}: {stdout}{errors}"


@pytest.mark.slow
def test_run_tests_with_another_pytorch(clone: Clone, image: Path) -> None:
    write_wheel(clone.wheels, "torch", "2.12.0")
    write_wheel(clone.wheels, "pytest", "8.1", source=PYTEST)
    command = [clone.root / "run_tests.sh", "--torch", "2.12.0", "-k", "two words"]
    process = clone.start(*command, PYTHON=image)
    stdout, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, errors
    assert stdout == "True 1 -m not slow -n 2 --dist loadfile --no-loadscope-reorder -k two words\n"
    packages = packages_of(clone.root / ".venv-torch-2.12.0" / "bin" / "python")
    versions = {name: version for name, (version, _) in packages.items() if name != "setuptools"}
    assert versions == {"torch": "2.12.0", "numpy": "2.4", "small-one": "1.2", "pytest": "8.1"}
    assert clone.start(*command, PYTHON=image, PIP_FIND_LINKS="").communicate()[0] == stdout
    assert not clone.venv.exists()


@pytest.mark.slow
def test_gpu_stub_needs_a_cuda_build(clone: Clone, image: Path) -> None:
    write_wheel(clone.wheels, "pytest", "8.1", source=PYTEST)
    command = [clone.root / "run_tests.sh", "--gpu-stub", "-k", "two words"]
    source = "class version: cuda = {!r}\n__version__ = '2.13.0+x'"
    write_wheel(clone.wheels, "torch", "2.13.0", source=source.format(None))
    process = clone.start(*command, PYTHON=image)
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    assert "torch 2.13.0+x, which is not a CUDA build" in errors
    assert "PIP_CONFIG_FILE=/dev/null" in errors
    assert not list(clone.root.glob(".venv-*"))
    write_wheel(clone.wheels, "torch", "2.13.0", source=source.format("13.0"))
    process = clone.start(*command, PYTHON=image)
    stdout, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, errors
    assert " --gpu-stub -rs tests/gpu_without_gpu " in stdout
    assert (clone.root / ".venv-torch-2.13.0-cuda" / "bin" / "python").exists()


@pytest.mark.parametrize("version", ["new", "../2.12.0", ""])
def test_invalid_version_is_rejected(clone: Clone, image: Path, version: str) -> None:
    process = clone.start(clone.root / "run_tests.sh", "--torch", version, PYTHON=image)
    stderr = process.communicate(timeout=PATIENCE_SECONDS)[1]
    assert process.returncode == 2
    assert f"--torch {version!r} is not a version" in stderr
    assert not list(clone.root.glob(".venv*"))


class Pip:
    """Mock of venv and pip that records requirements and constraints."""

    def __init__(self) -> None:
        self.requirements: list[str] = []
        self.constraints = ""
        self.error: BaseException | None = None

    def __call__(self, command: list[Any]) -> str:
        if "--constraint" in command:
            at = command.index("--constraint")
            self.requirements = command[at + 2 :]
            self.constraints = command[at + 1].read_text()
            if self.error is not None:
                raise self.error
        return ""


@pytest.fixture
def pip(clone: Clone, monkeypatch: pytest.MonkeyPatch) -> Pip:
    pip = Pip()
    monkeypatch.setattr(make_environment, "ROOT", clone.root)
    monkeypatch.setattr(make_environment, "run", pip)
    return pip


def test_other_packages_are_pinned_lowest_or_newest(pip: Pip) -> None:
    asked = {}
    for name in ["", "-lowest", "-newest"]:
        folder = make_environment.test_environment("2.12.0", name.removeprefix("-"))
        assert folder.name == f".venv-torch-2.12.0{name}"
        asked[name] = (pip.requirements, pip.constraints.split())
    torch, newest = "torch>=2.11,==2.12.0", ["numpy>=2.0", "small-one>=1.0", "pytest>=8.0"]
    assert asked[""] == ([torch, *newest], ["numpy==2.4", "pytest==8.1", "small_one==1.2"])
    assert asked["-lowest"] == ([torch, "numpy==2.0", "small-one==1.0", "pytest==8.0"], [])
    assert asked["-newest"] == ([torch, *newest], [])


@pytest.mark.parametrize("error", [KeyboardInterrupt(), make_environment.InstallError("no disk")])
def test_test_environment_is_complete_or_rebuilt(pip: Pip, error: BaseException) -> None:
    pip.error = error
    with pytest.raises(type(error)):
        make_environment.test_environment("2.12.0", "")
    assert not (make_environment.ROOT / ".venv-torch-2.12.0").exists()
    pip.error = None
    folder = make_environment.test_environment("2.12.0", "")
    pip.requirements.clear()
    make_environment.test_environment("2.12.0", "")
    assert pip.requirements == []
    # A start that was killed during installation.
    (folder / make_environment.UNFINISHED).touch()
    make_environment.test_environment("2.12.0", "")
    assert pip.requirements
    # Other constraints.
    pip.requirements.clear()
    with (make_environment.ROOT / "constraints.txt").open("a") as file:
        file.write("new==1.0\n")
    make_environment.test_environment("2.12.0", "")
    assert pip.requirements
