"""Two nodes that differ in one thing: both name it and end, or it changes nothing.

docs/howto/preflight.md, "Ranks that differ", lists what is compared.
"""

import base64
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from runtime import exit_codes
from tests.lib.forked import checkpoints, differences
from tests.lib.nodes import DIFFERENCE, copy_repository, run_nodes
from tests.lib.repository import ROOT

# Usually of tokenizers: test_nodes.py has a pair of nodes with all other differences.
COUNT, USUALLY = 100, 1
KEYS = {
    "training.max_norm": "7.0",
    "optimizer.lr": "0.5",
    "optimizer.beta1": "0.5",
    "debug.seed": "43",
    "training.steps": "2",
    "metrics.log_freq": "3",
    "checkpoint.interval": "7",
    "lr_scheduler.warmup_steps": "1",
    "data.document_mask": "true",
    "validation.steps": "2",
    "comm.train_timeout_seconds": "77",
}
PACKAGES = ("numpy", "pydantic", "xxhash", "tiktoken", "torch", "safetensors", "tokenizers")
NUMERIC = {
    "NVIDIA_TF32_OVERRIDE": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1",
    "MKL_CBWR": "COMPATIBLE",
    "ATEN_CPU_CAPABILITY": "default",
    "NCCL_ALGO": "Ring",
    "TORCHINDUCTOR_MAX_AUTOTUNE": "1",
}
FREE = {
    "OMP_NUM_THREADS": "2",
    "MKL_NUM_THREADS": "2",
    "TMPDIR": "tmp",
    "TORCH_LOGS": "+dynamo",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
    "TZ": "Asia/Kathmandu",
    "LANG": "C",
    "HF_HOME": "tmp",
    "NCCL_DEBUG": "INFO",
}
SOURCES = ("optim/loss.py", "train.py", "models/llama3.py", "runtime/program.py", "data/mixture.py")
# A file that Python imports before all others, the same on both nodes.
CLOCK = """
import os, time
clock, offset = time.time, float(os.environ.get("CLOCK_SECONDS", 0))
time.time = lambda: clock() + offset
"""


@dataclass
class Node:
    """All that one node has of its own, in its folder."""

    folder: Path
    root: Path = ROOT
    environment: dict[str, str] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.folder / "text").mkdir(parents=True)
        (self.folder / "sitecustomize.py").write_text(CLOCK)
        for name in ("a", "b"):
            (self.folder / "text" / f"{name}.txt").write_text(f"{name} text " * 400)
        ranks = "".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256))
        (self.folder / "t.tiktoken").write_text(ranks)
        special = {"<|begin_of_text|>": 256, "<|end_of_text|>": 257}
        self.write_companion(special)

    def write_companion(self, special: dict[str, int]) -> None:
        content = {"pattern": r"(?s).{1,9}", "special_tokens": special}
        (self.folder / "t.tiktoken.json").write_text(json.dumps(content))

    @property
    def start(self) -> dict[str, Any]:
        """Keywords of ``tests.lib.launch.start``."""
        own = {"PYTHONPATH": str(self.folder), **self.environment}
        return {
            "root": self.root,
            "cwd": self.folder,
            "environment": own,
            "data.source": "files",
            "data.path": "text/*.txt",
            "data.tokenizer": "t.tiktoken",
            "training.dtype": "float32",
            "checkpoint.interval": "1",
            **self.keys,
        }


def key(rng: random.Random, node: Node) -> str:
    name = rng.choice(list(KEYS))
    node.keys[name] = KEYS[name]
    return name


def source(rng: random.Random, node: Node) -> str:
    file = rng.choice(SOURCES)
    node.root = copy_repository(node.folder / "copy", file)
    return f"file {file}"


def package(rng: random.Random, node: Node) -> str:
    name = rng.choice(PACKAGES)
    path = node.folder / f"{name}-9.9.9.dist-info" / "METADATA"
    path.parent.mkdir()
    path.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9.9\n")
    return f"package {name}"


def data(rng: random.Random, node: Node) -> str:
    path = node.folder / "text" / "a.txt"
    ways: list[Callable[[], object]] = [
        lambda: path.write_text("A" + path.read_text()[1:]),
        lambda: path.write_text(path.read_text() + "more"),
        path.unlink,
        lambda: path.rename(path.with_name("c.txt")),
        lambda: path.with_name("c.txt").write_text("more"),
    ]
    rng.choice(ways)()
    return "documents of text"


def tokenizer(rng: random.Random, node: Node) -> str:
    node.write_companion({"<|begin_of_text|>": 257, "<|end_of_text|>": 256})
    return "tokenizer"


def variable(rng: random.Random, node: Node) -> str:
    name = rng.choice(list(NUMERIC))
    node.environment[name] = NUMERIC[name]
    return f"environment variable {name}"


def free_variable(rng: random.Random, node: Node) -> str:
    name = rng.choice(list(FREE))
    (node.folder / "tmp").mkdir()
    node.environment[name] = FREE[name].replace("tmp", str(node.folder / "tmp"))
    return ""


def clock(rng: random.Random, node: Node) -> str:
    node.environment["CLOCK_SECONDS"] = str(rng.choice([-86_400, -5, 5, 86_400]))
    return ""


def other_folder(rng: random.Random, node: Node) -> str:
    node.root = copy_repository(node.folder / "copy", None)
    return ""


THINGS = (
    tokenizer, key, source, package, data, variable, free_variable, clock, other_folder
)  # fmt: skip
# Programs read them after their imports, so that they may start warm.
READ_LATE = (tokenizer, key, data)


def run_trial(seed: int, base: Path) -> tuple[str, str]:
    """Run two nodes that differ. Return what differs, "" if it is free, and what is wrong."""
    rng, folder = random.Random(seed), base / str(seed)
    nodes = [Node(folder / name) for name in ("a", "b")]
    thing = THINGS[seed % len(THINGS)]
    differing = thing(rng, nodes[rng.randrange(2)])
    codes, outputs = run_nodes(
        folder / "out", [node.start for node in nodes], is_warm=thing in READ_LATE
    )
    where = f"{thing.__name__} {differing}: codes {codes}: " + "\n".join(outputs)[-3000:]
    if differing:
        named = [[found[0] for found in DIFFERENCE.findall(output)] for output in outputs]
        is_right = codes == [exit_codes.BAD_CONFIG] * 2 and named == [[differing]] * 2
        # Only what ranks said that the launcher does not show.
        is_right = is_right and {path.name for path in folder.glob("out/*/*")} <= {"logs"}
    else:
        is_right = codes == [exit_codes.DONE] * 2
        is_right = is_right and not differences(same_run(base), checkpoints(folder / "out")[0])
    if is_right:
        shutil.rmtree(folder)
    return differing, "" if is_right else where


def same_run(base: Path) -> Path:
    """Checkpoint of two equal nodes."""
    folder = base / "same"
    if not folder.exists():
        nodes = [Node(folder / name).start for name in ("a", "b")]
        codes, outputs = run_nodes(folder / "out", nodes, is_warm=False)
        assert codes == [exit_codes.DONE] * 2, "\n".join(outputs)
    return checkpoints(folder / "out")[0]


@pytest.mark.row(42, "Nodes that differ in one thing name it, or it changes nothing")
def test_nodes_that_differ_in_one_thing(
    tmp_path: Path,
    seeds: Callable[..., Iterator[int]],
    record_result: Callable[[str], None],
) -> None:
    named = free = 0
    for seed in seeds(COUNT, USUALLY):
        differing, wrong = run_trial(seed, tmp_path)
        assert not wrong, wrong
        named, free = named + bool(differing), free + (not differing)
    text = f"{named} of {named + free} pairs of nodes named their difference and ended with 2"
    record_result(text + (f"; {free} with a free one trained the same weights" if free else ""))
