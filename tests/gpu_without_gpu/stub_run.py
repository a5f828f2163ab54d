"""Runs of train.py on a GPU that is not there, and what each of their steps did."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from tests.gpu_without_gpu.stub_library import CACHE, build
from tests.lib.patience import PATIENCE_SECONDS
from tests.lib.ports import free_port
from tests.lib.repository import ROOT

GIB = 2**30


class Device(NamedTuple):
    name: str
    n_bytes: int
    """Memory that the driver reports."""


H200 = Device("NVIDIA H200", 150_754_820_096)
H100 = Device("NVIDIA H100 80GB HBM3", 84_983_332_864)

# The first and the last are logged.
N_STEPS = 5
QUIET = slice(2, N_STEPS)
SMALL = {
    "training.steps": str(N_STEPS),
    "data.source": "builtin",
    "data.tokenizer": "bytes",
    "metrics.log_freq": "1000",
    "metrics.trackers": "[]",
    "checkpoint.enable": "false",
    "validation.enable": "false",
    "validation.sample_tokens": "0",
    "lr_scheduler.warmup_steps": "0",
    # The host launches each kernel, so that they are counted.
    "compile.cuda_graphs": "never",
}
GRAPHS = {"compile.cuda_graphs": "auto"}


@dataclass(frozen=True)
class Step:
    """Record of one rank, from asking for a step's batch to asking for the next one."""

    seconds: float
    """Host time; it says nothing of a device."""
    cpu_seconds: float
    """CPU time of all threads of the rank."""
    allocated: int
    """Bytes at the end of the step."""
    peak_allocated: int
    peak_reserved: int
    retries: int
    """Allocations since the start that succeeded only after cached memory was freed."""
    counters: list[tuple[str, str, int, int]] = field(repr=False)
    """Kind, name, calls and bytes."""

    def count(self, kind: str, pattern: str = "") -> int:
        """Calls of a kind whose name contains ``pattern``, a regular expression."""
        return sum(self.calls(kind, pattern).values())

    def calls(self, kind: str, pattern: str = "") -> dict[str, int]:
        return {
            name: calls
            for counted, name, calls, _ in self.counters
            if counted == kind and re.search(pattern, name)
        }

    @property
    def syncs(self) -> dict[str, int]:
        """Waits of the host for the device; a copy to pageable memory waits, too."""
        return self.calls("sync") | self.calls("copy", "device to pageable")

    @property
    def device_allocations(self) -> dict[str, int]:
        """Calls that allocate device memory from the driver, which may wait for the device."""
        return self.calls("memory", "cuMemCreate|cudaMalloc|out of memory")


def train_on_stub(
    folder: Path,
    *,
    config: str = "debug_model",
    n_ranks: int = 1,
    device: Device = H200,
    environment: Mapping[str, str] = MappingProxyType({}),
    **keys: str,
) -> list[list[Step]]:
    """Train; return the steps of each rank. The first record is all that precedes step 1.

    Raises ``AssertionError`` with the output of a rank that fails.
    """
    keys = SMALL | {"job.output_dir": str(folder / "outputs")} | keys
    arguments = [f"train_configs/{config}.toml"]
    arguments += [part for key, value in keys.items() for part in (f"--{key}", value)]
    own = stub_variables(device, n_ranks) | environment
    folder.mkdir(parents=True, exist_ok=True)
    reports = [folder / f"rank-{rank}.jsonl" for rank in range(n_ranks)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu_without_gpu.stub_rank", str(report), *arguments],
            cwd=ROOT,
            env=os.environ | own | variables,
            stdout=report.with_suffix(".log").open("w"),
            stderr=subprocess.STDOUT,
        )
        for report, variables in zip(reports, rank_variables(n_ranks), strict=True)
    ]
    try:
        codes = [process.wait(timeout=PATIENCE_SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    output = "\n".join(report.with_suffix(".log").read_text() for report in reports)
    assert codes == [0] * n_ranks, f"exit codes {codes}\n{output}"
    return [list(steps_of(report)) for report in reports]


def stub_variables(device: Device, n_gpus: int) -> dict[str, str]:
    """Return the environment variables of a program on GPUs that are not there."""
    library = build()
    return {
        "LD_PRELOAD": str(library / "libcuda.so.1"),
        "LD_LIBRARY_PATH": str(library),
        "TRITON_LIBCUDA_PATH": str(library),
        "GPU_STUB_NAME": device.name,
        "GPU_STUB_BYTES": str(device.n_bytes),
        "GPU_STUB_COUNT": str(n_gpus),
        "PYTHONPATH": str(ROOT),
        # As the launcher sets it.
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        # A pool of compiling processes dies with the preloaded library.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(CACHE / "inductor"),
        "TRITON_CACHE_DIR": str(CACHE / "triton"),
        "OMP_NUM_THREADS": "1",
    }


def rank_variables(n_ranks: int) -> Iterator[dict[str, str]]:
    """Yield the environment variables of each rank, as torchrun sets them."""
    port = free_port()
    for rank in range(n_ranks):
        yield {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(n_ranks),
            "LOCAL_WORLD_SIZE": str(n_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }


def steps_of(report: Path) -> Iterator[Step]:
    # Kernels have C++ names.
    text = subprocess.run(["c++filt"], stdin=report.open(), capture_output=True, check=True).stdout
    for line in text.decode().splitlines():
        record = json.loads(line)
        yield Step(**record | {"counters": [tuple(each) for each in record["counters"]]})
