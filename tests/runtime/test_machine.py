import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from runtime.machine import enable_expandable_segments
from tests.lib.ranks import RankPool


def gloo_workers() -> int:
    """Number of worker threads of all gloo groups of this process, earlier tests included."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return names.count("pt_gloo_runloop")


def workers_of_new_group() -> int:
    dist.all_reduce(torch.ones(1))  # A thread gets its name when it starts.
    before = gloo_workers()
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)
    return gloo_workers() - before


def test_gloo_group_has_one_worker_thread(ranks: RankPool) -> None:
    assert ranks.run(workers_of_new_group, 2) == [1, 1]


FAULTS = """
import resource
import sys

import torch
from runtime import machine

if sys.argv[1] == "keep":
    machine.disable_malloc_trim()
for step in range(80):
    if step == 40:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(mode: str) -> int:
    """Page faults of 40 tensors of 64 MiB, each freed before the next, after 40 others."""
    command = [sys.executable, "-c", FAULTS, mode]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_malloc_keeps_memory_of_freed_tensors() -> None:
    assert page_faults("keep") < page_faults("as it is") / 4


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
