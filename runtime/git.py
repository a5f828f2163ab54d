"""State of a git repository, read without running anything that its configuration names.

A repository's own configuration may name programs: file system monitors, hooks, external diffs,
text conversions, filters, pagers, helpers that fetch. All are switched off here. Sources: the pages
git(1), git-config(1), git-diff(1) and gitattributes(5).
"""

import os
import shutil
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile

SETTINGS = {
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,
    "core.untrackedCache": "false",
    "core.quotePath": "false",
    "diff.orderFile": os.devnull,
    "protocol.allow": "never",
    "safe.bareRepository": "explicit",
    "submodule.recurse": "false",
}
VARIABLES = {
    "GIT_ALLOW_PROTOCOL": "",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
}
STATUS = ("status", "--porcelain=v2", "--branch", "-z", "--no-renames", "--ignore-submodules=dirty")
DIFF = (
    *("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--no-renames", "--submodule=short"),
    *("--ignore-submodules=dirty", "--src-prefix=a/", "--dst-prefix=b/", "HEAD", "--"),
)
MAX_BYTES, MAX_FILES, SECONDS = 1 << 20, 200, 20.0


class GitError(RuntimeError):
    """Git cannot read the repository."""


@dataclass(frozen=True)
class WorkingTree:
    """Commit of a working tree, and how its files differ from it."""

    commit: str
    """"" before the first one."""
    branch: str
    """"" if HEAD is detached."""
    changed: list[str] = field(default_factory=list)
    untracked: list[str] = field(default_factory=list)
    """Files that are not ignored either, and folders of nothing else."""
    diff: str = ""
    """From the commit to the files, at most ``MAX_BYTES``."""


def read_working_tree(root: Path) -> WorkingTree | None:
    """State of the repository whose top is ``root``; None if it is none.

    Raises ``GitError`` if git is missing or cannot read it.
    """
    if not (root / ".git").exists():
        return None
    # An entry that is not absolute would be looked up in some folder.
    entries = filter(os.path.isabs, os.environ.get("PATH", os.defpath).split(os.pathsep))
    program = shutil.which("git", path=os.pathsep.join(entries))
    if program is None:
        raise GitError("git is not installed")
    git = _Git(program, root.resolve())
    top = git.run("rev-parse", "--show-toplevel").removesuffix("\n")
    if Path(top).resolve() != root.resolve():
        # core.worktree may name any folder, whose files would be read.
        raise GitError(f"the repository's files are in {top}")
    commit = branch = ""
    changed, untracked = [], []
    for entry in git.run(*STATUS).split("\0"):
        kind, _, rest = entry.partition(" ")
        if kind == "?":
            untracked.append(rest)
        elif kind in ("1", "u"):
            changed.append(rest.split(" ", 7 if kind == "1" else 9)[-1])
        elif rest.startswith("branch.oid ") and not rest.endswith("(initial)"):
            commit = rest.removeprefix("branch.oid ")
        elif rest.startswith("branch.head ") and not rest.endswith("(detached)"):
            branch = rest.removeprefix("branch.head ")
    diff = git.run(*DIFF) if changed and commit else ""
    return WorkingTree(commit, branch, changed[:MAX_FILES], untracked[:MAX_FILES], diff)


class _Git:
    def __init__(self, program: str, root: Path) -> None:
        self._root = root
        self._command = [program, "--no-pager", "--literal-pathspecs"]
        self._command += [part for key, v in SETTINGS.items() for part in ("-c", f"{key}={v}")]
        own = {name: v for name, v in os.environ.items() if not name.startswith("GIT_")}
        self._environment = own | VARIABLES | {"GIT_CEILING_DIRECTORIES": str(root.parent)}
        # Filters have no switch: each is replaced by none.
        pattern = r"^filter\..*\.(clean|smudge|process|required)$"
        keys = self.run("config", "--null", "--name-only", "--get-regexp", pattern, may_fail=True)
        for key in filter(None, keys.split("\0")):
            if "=" in key:
                raise GitError(f"the filter {key!r} cannot be switched off")
            value = "false" if key.endswith(".required") else ""
            self._command += ["-c", f"{key}={value}"]

    def run(self, *arguments: str, may_fail: bool = False) -> str:
        """Output of a command, cut off at ``MAX_BYTES``. Raises ``GitError`` if it fails."""
        with TemporaryFile() as errors:
            process = subprocess.Popen(
                [*self._command, *arguments],
                cwd=self._root,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
            # A file system may not answer.
            timer = threading.Timer(SECONDS, process.kill)
            timer.daemon = True
            timer.start()
            with process:
                assert process.stdout is not None
                output = process.stdout.read(MAX_BYTES + 1)
                is_cut = len(output) > MAX_BYTES
                if is_cut:
                    process.kill()
            timer.cancel()
            errors.seek(0)
            message = errors.read(1000).decode(errors="replace").strip().partition("\n")[0]
        if process.returncode != 0 and not is_cut and not may_fail:
            text = message or f"exit code {process.returncode}"
            raise GitError(f"git {arguments[0]}: {text}")
        return output[:MAX_BYTES].decode(errors="replace")
