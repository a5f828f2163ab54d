"""Record the provenance of this start, beside the work of starting. Nothing here ends a run."""

import json
import os
import platform
import re
import socket
import sys
import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import tomli
import tomli_w
import torch
import torch.distributed as dist

from runtime.commands import COMMAND_VARIABLE
from runtime.git import GitError, WorkingTree, read_working_tree
from runtime.log import logger
from runtime.machine import available_cpus
from runtime.masking import Masker
from runtime.object_collectives import gather_to_rank0
from runtime.program import ROOT
from runtime.provenance import (
    FOLDER,
    Attempt,
    Node,
    attempt_numbers,
    changes,
    read_attempt,
    write_attempt,
    write_content,
)
from runtime.run_folder import timestamp
from runtime.torch_device import device_name

# A file system or git that does not answer holds up no run for longer.
SECONDS = 10.0
# The name of an installed package's folder has its name and version.
# https://packaging.python.org/en/latest/specifications/recording-installed-packages/
INSTALLED = re.compile(r"(.+?)-([^-]+)(?:-.*)?\.(?:dist|egg)-info")


class AttemptRecorder:
    """Collects this start's facts in a thread of rank 0, and writes them to ``provenance/``."""

    def __init__(self, run_folder: Path, config_text: str, facts: Mapping[str, str]) -> None:
        """``config_text``: TOML. ``facts``: of ``runtime.program``. Collective."""
        self._folder, self._config, self._facts = run_folder / FOLDER, config_text, facts
        self._world_size = dist.get_world_size()
        self._attempt: Attempt | None = None
        # One rank of each node describes it.
        is_first = os.environ.get("LOCAL_RANK", "0") == "0"
        self._nodes = gather_to_rank0(lambda: _describe_node() if is_first else None)
        self._thread: threading.Thread | None = None
        if dist.get_rank() == 0:
            self._thread = threading.Thread(target=self._record, name="provenance", daemon=True)
            self._thread.start()

    def finish(self, resumed_step: int | None) -> None:
        """Add the step of the checkpoint, and log what changed since the attempt before."""
        if self._thread is None:
            return
        self._thread.join(SECONDS)
        if self._thread.is_alive():
            logger.warning("provenance: not collected after %.0f s; the run goes on", SECONDS)
        if self._attempt is None:
            return
        try:
            self._finish(replace(self._attempt, resumed_from=resumed_step))
        except (OSError, ValueError) as error:
            logger.warning("provenance: not compared with the attempt before: %s", error)

    def _finish(self, attempt: Attempt) -> None:
        if attempt.resumed_from is not None:
            write_attempt(self._folder, attempt)
        earlier = [number for number in attempt_numbers(self._folder) if number < attempt.number]
        if earlier:
            before = read_attempt(self._folder, earlier[-1])
            for text in changes(self._folder, before, attempt):
                logger.info("changed since attempt %d: %s", before.number, text)

    def _record(self) -> None:
        try:
            attempt = self._collect()
            write_attempt(self._folder, attempt)
            self._attempt = attempt
        except Exception as error:  # A run needs no provenance.
            logger.warning("provenance: not recorded: %s: %s", type(error).__name__, error)

    def _collect(self) -> Attempt:
        masker, tree, problem = Masker(os.environ), None, ""
        try:
            tree = read_working_tree(ROOT)
        except (GitError, OSError) as error:
            problem = str(error)
            logger.warning("provenance: no commit is recorded: %s", problem)
        tree = tree or WorkingTree(commit="", branch="")
        command = json.loads(os.environ.get(COMMAND_VARIABLE, "null")) or sys.orig_argv
        diff = masker.text(tree.diff)
        software = tomli_w.dumps(describe_software(self._facts))
        # The text would not be TOML with parts masked.
        folder, config = self._folder, tomli_w.dumps(masker.tables(tomli.loads(self._config)))
        return Attempt(
            number=max(attempt_numbers(folder), default=0) + 1,
            time=timestamp(),
            command=masker.arguments(command),
            working_directory=os.getcwd(),
            version=_version(),
            commit=tree.commit,
            branch=tree.branch,
            changed=tree.changed,
            untracked=tree.untracked,
            diff=write_content(folder, "diff", "diff", diff) if diff else "",
            git_problem=problem,
            world_size=self._world_size,
            nodes=merge_nodes(self._nodes),
            variables=masker.variables(),
            config=write_content(folder, "config", "toml", config),
            software=write_content(folder, "software", "toml", software),
            resumed_from=None,
        )


def describe_software(facts: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Python, PyTorch's build, installed packages, and hashes of the sources that run."""
    program = {
        key: value
        for key, value in facts.items()
        if not key.startswith(("package ", "file ", "environment variable "))
    }
    sources = {key[5:]: value for key, value in facts.items() if key.startswith("file ")}
    build = " ".join(torch.__config__.show().split())
    return {
        "program": {**program, "PyTorch": torch.__version__, "build of PyTorch": build},
        "packages": installed_packages(),
        "sources": sources,
    }


def installed_packages() -> dict[str, str]:
    """Versions of the packages that can be imported, by name; the first on the path counts."""
    # importlib.metadata opens each package's files for the same, and takes 50 times as long.
    found: dict[str, str] = {}
    for entry in sys.path:
        try:
            names = os.listdir(entry or ".")
        except OSError:
            continue
        for match in filter(None, map(INSTALLED.fullmatch, names)):
            found.setdefault(match[1].lower().replace("_", "-"), match[2])
    return dict(sorted(found.items()))


def _version() -> str:
    try:
        return metadata.version("shardloom")
    except metadata.PackageNotFoundError:  # It runs in place.
        return ""


def _describe_node() -> tuple[str, int, dict[str, str]]:
    """Host, its ranks, and its machine. Raises nothing."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or dist.get_world_size())
    try:
        return socket.gethostname(), ranks, describe_machine()
    except Exception as error:  # Drivers raise many.
        return socket.gethostname(), ranks, {"problem": str(error)}


def describe_machine() -> dict[str, str]:
    """CPU, memory, kernel, and GPUs with their driver, of this node."""
    driver = Path("/proc/driver/nvidia/version")
    model = device_name(torch.device("cpu"))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    machine = {"cpu": f"{available_cpus()} x {model}", "memory": f"{memory:.0f} GiB"}
    if torch.cuda.is_available():
        names: dict[str, int] = defaultdict(int)
        for index in range(torch.cuda.device_count()):
            names[torch.cuda.get_device_properties(index).name] += 1
        machine["gpus"] = ", ".join(f"{count} x {name}" for name, count in names.items())
    if driver.exists() and (version := re.search(r"\s(\d+\.[\d.]+)\s", driver.read_text())):
        machine["driver"] = f"driver {version[1]}"
    return machine | {"kernel": f"{platform.system()} {platform.release()}"}


def merge_nodes(found: list[tuple[str, int, dict[str, str]] | None]) -> list[Node]:
    """Merge nodes that are alike; ``found`` is None for ranks that did not describe theirs."""
    hosts: dict[str, list[str]] = defaultdict(list)
    nodes = [node for node in found if node is not None]
    for host, ranks, machine in nodes:
        hosts[json.dumps([ranks, machine])].append(host)
    parsed = ((json.loads(key), names) for key, names in hosts.items())
    return [Node(hosts=names, ranks=key[0], machine=key[1]) for key, names in parsed]
