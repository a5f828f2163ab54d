import math
import mmap
import os
import resource
import subprocess
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from runtime.machine import disable_malloc_trim, host_memory, host_memory_left, own_memory
from runtime.torch_device import enable_expandable_segments
from tests.lib.ranks import PRELOADED, RankPool


def gloo_threads() -> Counter[str]:
    """Number of threads of gloo in this process, by name, those of earlier tests included."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return Counter(name for name in names if "gloo" in name)


def threads_of_new_group() -> Counter[str]:
    dist.all_reduce(torch.ones(1))  # A thread gets its name when it starts.
    before = gloo_threads()
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)
    return gloo_threads() - before


def test_gloo_group_adds_one_thread_that_does_not_poll(ranks: RankPool) -> None:
    assert ranks.run(threads_of_new_group, 2) == [Counter({"pt_gloo_runloop": 1})] * 2


LIMITS = """
import resource

from runtime.machine import raise_open_file_limit

_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
raise_open_file_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard))
"""


def test_open_files_are_limited_by_the_hard_limit() -> None:
    command = [sys.executable, "-c", LIMITS]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout == "True\n"


SCHEDULING = """
import os
import sys
from concurrent.futures import ThreadPoolExecutor

from runtime.machine import schedule_as_batch

os.sched_setscheduler(0, getattr(os, sys.argv[1]), os.sched_param(0))
schedule_as_batch()
names = {os.SCHED_BATCH: "SCHED_BATCH", os.SCHED_IDLE: "SCHED_IDLE"}
with ThreadPoolExecutor(1) as pool:
    started = pool.submit(os.sched_getscheduler, 0).result()
print(names[os.sched_getscheduler(0)], names[started])
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux only")
@pytest.mark.parametrize(
    ("before", "after"), [("SCHED_OTHER", "SCHED_BATCH"), ("SCHED_IDLE", "SCHED_IDLE")]
)
def test_threads_are_batch_work_unless_a_policy_was_chosen(before: str, after: str) -> None:
    command = [sys.executable, "-c", SCHEDULING, before]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.split() == [after, after]


def page_faults_before_and_after() -> list[int]:
    """Page faults of 10 tensors of 64 MiB, each freed before the next, after 10 others."""
    found = []
    for prepare in (lambda: None, disable_malloc_trim):
        prepare()
        for step in range(20):
            if step == 10:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            torch.ones(1 << 24)
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return found


def test_malloc_keeps_memory_of_freed_tensors() -> None:
    # In a process whose malloc nobody has set.
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, context) as pool:
        before, after = pool.submit(page_faults_before_and_after).result()
    assert after < before / 4


@pytest.mark.parametrize("variable", ["", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_unless_the_user_set_options(variable: str) -> None:
    environment = {variable: "max_split_size_mb:512"} if variable else {}
    with patch.dict(os.environ, environment, clear=True):
        enable_expandable_segments()
        assert dict(os.environ) == environment
        with patch.object(torch.cuda, "is_available", return_value=True):
            enable_expandable_segments()
        expandable = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        assert dict(os.environ) == (environment or expandable)


def test_own_memory_counts_what_no_file_backs(tmp_path: Path) -> None:
    before = own_memory()
    # Pages of its own: malloc may give a tensor what earlier tests freed, which still counts.
    pages = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    kept = torch.frombuffer(pages, dtype=torch.uint8).fill_(1)
    assert own_memory() - before >= kept.numel()
    (tmp_path / "tokens").write_bytes(bytes(64 << 20))
    before = own_memory()
    mapped = torch.from_file(str(tmp_path / "tokens"), size=64 << 20, dtype=torch.uint8)
    assert mapped.max() == 0
    assert own_memory() - before < mapped.numel() / 4


MEMINFO = "MemTotal: 24000 kB\nMemFree: 100 kB\nMemAvailable:    9000 kB\n"


@pytest.mark.parametrize(
    ("files", "kib", "total"),
    [
        ({}, math.inf, math.inf),
        ({"proc/meminfo": MEMINFO}, 9000, 24000),
        # Version 2: the limit of the job above the step, in which files are cached.
        (
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "0::/job/step",
                "sys/fs/cgroup/job/step/memory.max": "max",
                "sys/fs/cgroup/job/step/memory.current": "1024",
                "sys/fs/cgroup/job/memory.max": str(5000 << 10),
                "sys/fs/cgroup/job/memory.current": str(3000 << 10),
                "sys/fs/cgroup/job/memory.stat": f"anon 7\ninactive_file {1000 << 10}\n",
            },
            3000,
            5000,
        ),
        # In a container, the group's own files are at the top.
        (
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "0::/elsewhere",
                "sys/fs/cgroup/memory.max": str(5000 << 10),
                "sys/fs/cgroup/memory.current": str(3000 << 10),
            },
            2000,
            5000,
        ),
        # Version 1, and one that is over its limit.
        (
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "4:cpu,memory:/job\n0::/",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(5000 << 10),
                "sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(3000 << 10),
                "sys/fs/cgroup/memory/job/memory.stat": f"total_inactive_file {100 << 10}",
            },
            2100,
            5000,
        ),
        (
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "4:memory:/",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "5",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "6",
            },
            0,
            5 / 1024,
        ),
    ],
)
def test_memory_left_is_that_of_the_tightest_limit(
    tmp_path: Path, files: dict[str, str], kib: float, total: float
) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert host_memory_left(tmp_path) == kib * 1024
    assert host_memory(tmp_path) == total * 1024
    assert 0 < host_memory_left() <= host_memory() < 2**50
