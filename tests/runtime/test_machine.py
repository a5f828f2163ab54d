import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from runtime.machine import let_segments_grow
from tests.ranks import RankPool


def gloo_workers() -> int:
    """Worker threads of all gloo groups of this process, those of earlier tests too."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return names.count("pt_gloo_runloop")


def workers_of_a_new_group() -> int:
    dist.all_reduce(torch.ones(1))  # A thread has its name once it has begun.
    before = gloo_workers()
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)
    return gloo_workers() - before


def test_a_gloo_group_has_one_worker(ranks: RankPool) -> None:
    assert ranks.run(workers_of_a_new_group, 2) == [1, 1]


FAULTS = """
import resource
import sys

import torch
from runtime import machine

if sys.argv[1] == "keep":
    machine.keep_freed_memory()
for step in range(80):
    if step == 40:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str) -> int:
    """Of forty tensors of 64 MiB, each freed before the next, in a process that had forty."""
    command = [sys.executable, "-c", FAULTS, how]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_memory_of_freed_tensors_is_kept() -> None:
    assert page_faults("keep") < page_faults("as it is") / 4


@pytest.mark.parametrize("said", ["", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_grow_unless_the_user_says_how(said: str) -> None:
    environment = {said: "max_split_size_mb:512"} if said else {}
    with patch.dict(os.environ, environment, clear=True):
        let_segments_grow()
        assert dict(os.environ) == environment
        with patch.object(torch.cuda, "is_available", return_value=True):
            let_segments_grow()
        grown = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        assert dict(os.environ) == (environment or grown)
