"""Git's answers are right, and a repository's own configuration runs nothing."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from runtime import git
from runtime.git import GitError, read_working_tree

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def call(root: Path, *arguments: str) -> str:
    author = ["-c", "user.name=a", "-c", "user.email=a@b.example", "-c", "init.defaultBranch=main"]
    return subprocess.run(
        ["git", *author, *arguments], cwd=root, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with one commit of three files."""
    folder = tmp_path / "repository"
    folder.mkdir()
    call(folder, "init", "-q")
    for name in ("a.py", "b c.py", "ü.txt"):
        (folder / name).write_text("one\n")
    (folder / ".gitignore").write_text("ignored/\n")
    call(folder, "add", "-A")
    call(folder, "commit", "-q", "-m", "first")
    return folder


def test_clean_tree(root: Path) -> None:
    tree = read_working_tree(root)
    assert tree is not None
    assert (tree.commit, tree.branch) == (call(root, "rev-parse", "HEAD"), "main")
    assert (tree.changed, tree.untracked, tree.diff) == ([], [], "")


def test_changes_and_untracked_files(root: Path) -> None:
    (root / "b c.py").write_text("two\n")
    (root / "ü.txt").unlink()
    (root / "a.py").write_text("staged\n")
    call(root, "add", "a.py")
    for name in ("new.py", "models/mine.py", "ignored/large.bin"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("new\n")
    call(root, "checkout", "-q", "--detach")
    tree = read_working_tree(root)
    assert tree is not None
    assert tree.branch == ""
    assert tree.changed == ["a.py", "b c.py", "ü.txt"]
    assert sorted(tree.untracked) == ["models/", "new.py"]
    # The diff leads from the commit to the files.
    call(root, "stash", "-q")
    subprocess.run(["git", "apply"], cwd=root, input=tree.diff, check=True, text=True)
    assert (root / "b c.py").read_text() == "two\n"
    assert (root / "a.py").read_text() == "staged\n"
    assert not (root / "ü.txt").exists()


def test_repository_without_a_commit(tmp_path: Path) -> None:
    call(tmp_path, "init", "-q")
    (tmp_path / "a.py").touch()
    tree = read_working_tree(tmp_path)
    assert tree is not None
    assert (tree.commit, tree.branch, tree.untracked) == ("", "main", ["a.py"])


def test_long_diff_is_cut_off(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "a.py").write_text("line\n" * (1 << 20))
    tree = read_working_tree(root)
    assert tree is not None
    assert len(tree.diff) == git.MAX_BYTES
    monkeypatch.setattr(git, "MAX_FILES", 2)
    for index in range(5):
        (root / f"{index}.py").touch()
    tree = read_working_tree(root)
    assert tree is not None
    assert len(tree.untracked) == 2


def test_folder_inside_a_repository_is_none(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an installed package in an environment in somebody's repository."""
    (root / "site-packages").mkdir()
    assert read_working_tree(root / "site-packages") is None
    # Whose .git is a broken one: git looks no further.
    (root / "site-packages" / ".git").mkdir()
    with pytest.raises(GitError, match="not a git repository"):
        read_working_tree(root / "site-packages")
    monkeypatch.setenv("GIT_DIR", str(root / ".git"))
    with pytest.raises(GitError, match="not a git repository"):
        read_working_tree(root / "site-packages")


def test_missing_git_is_an_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = root / "git"
    planted.write_text("#!/bin/sh\ntouch ran\n")
    planted.chmod(0o700)
    monkeypatch.chdir(root)
    monkeypatch.setenv("PATH", ":.")
    with pytest.raises(GitError, match="not installed"):
        read_working_tree(root)
    assert not (root / "ran").exists()


def plant(root: Path, program: Path) -> None:
    """Name ``program`` wherever a repository's configuration can, and change all files."""
    (root / ".gitattributes").write_text("*.py filter=planted diff=planted\n")
    call(root, "add", "-A")
    call(root, "commit", "-q", "-m", "attributes")
    hooks = root / ".git" / "hooks"
    hooks.mkdir(exist_ok=True)
    for name in ("post-index-change", "fsmonitor-watchman", "pre-auto-gc", "reference-transaction"):
        shutil.copy(program, hooks / name)
    settings = {
        "core.fsmonitor": program, "core.pager": program, "core.editor": program,
        "core.sshCommand": program, "core.hooksPath": hooks, "diff.external": program,
        "diff.planted.command": program, "diff.planted.textconv": program,
        "filter.planted.clean": program, "filter.planted.required": "true", "pager.diff": program,
        "pager.status": program, "interactive.diffFilter": program, "gpg.program": program,
        "credential.helper": f"!{program}", "alias.status": f"!{program}",
    }  # fmt: skip
    for key, value in settings.items():
        call(root, "config", key, str(value))
    # Of other sizes, or git compares no contents.
    for path in root.glob("*.py"):
        path.write_text("changed\n")


def test_configuration_of_a_repository_runs_nothing(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, ran = tmp_path / "program", tmp_path / "ran"
    program.write_text(f"#!/bin/sh\necho $0 $* >>{ran}\ncat\n")
    program.chmod(0o700)
    for name in ("GIT_EXTERNAL_DIFF", "GIT_PAGER", "GIT_SSH_COMMAND", "GIT_ASKPASS"):
        monkeypatch.setenv(name, str(program))
    plant(root, program)
    tree = read_working_tree(root)
    assert tree is not None
    assert tree.changed == ["a.py", "b c.py"]
    assert "+changed" in tree.diff
    assert not ran.exists(), ran.read_text()
    # Git itself runs them.
    subprocess.run(["git", "diff"], cwd=root, capture_output=True)
    subprocess.run(["git", "status"], cwd=root, capture_output=True)
    assert ran.exists()


def test_filter_that_cannot_be_switched_off_is_an_error(root: Path) -> None:
    call(root, "config", "filter.a=b.clean", "touch ran")
    with pytest.raises(GitError, match="filter"):
        read_working_tree(root)


def test_files_elsewhere_are_not_read(root: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "home"
    elsewhere.mkdir()
    (elsewhere / "a.py").write_text("private\n")
    call(root, "config", "core.worktree", str(elsewhere))
    with pytest.raises(GitError, match="home"):
        read_working_tree(root)


def test_missing_objects_are_not_fetched(root: Path, tmp_path: Path) -> None:
    """A partial clone fetches what is missing, by a program that its configuration may name."""
    call(root, "config", "uploadpack.allowFilter", "true")
    clone, ran = tmp_path / "clone", tmp_path / "ran"
    url = f"file://{root}"
    call(tmp_path, "clone", "-q", "--filter=blob:none", "--no-checkout", url, str(clone))
    call(clone, "config", "remote.origin.uploadpack", f"touch {ran};")
    call(clone, "read-tree", "HEAD")
    (clone / "a.py").write_text("changed\n")
    with pytest.raises(GitError):
        read_working_tree(clone)
    assert not ran.exists()
    subprocess.run(["git", "diff"], cwd=clone, capture_output=True, env=os.environ)
    assert ran.exists()
