"""Process groups have the configured timeout, and each rank a GPU that it can see."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from config.job_config import Comm
from runtime.distributed import init_distributed

TIMEOUTS = """
import torch
import torch.distributed as dist

from config.job_config import Comm
from runtime.distributed import init_distributed

init_distributed(Comm(init_timeout_seconds=77))
for group in (dist.group.WORLD, dist.new_group()):
    print(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
"""


def test_all_groups_have_the_configured_timeout() -> None:
    command = [sys.executable, "-c", TIMEOUTS]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert found.split() == ["77.0", "77.0"]


SCHEDULING = """
import os
from pathlib import Path

import torch
import torch.distributed as dist

from config.job_config import Comm
from runtime.distributed import init_distributed

os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
init_distributed(Comm())
dist.all_reduce(torch.ones(1))
gloo = []
while not gloo:  # A thread gets its name when it runs.
    tasks = Path("/proc/self/task").iterdir()
    gloo = [int(task.name) for task in tasks if "gloo" in (task / "comm").read_text()]
print({os.sched_getscheduler(thread) for thread in gloo} == {os.SCHED_BATCH})
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux only")
def test_threads_of_gloo_preempt_nobody() -> None:
    command = [sys.executable, "-c", SCHEDULING]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert found == "True\n"


@pytest.mark.parametrize(("visible", "index"), [(8, 3), (1, 0), (2, 1)])
def test_rank_gets_a_visible_gpu(visible: int, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    chosen = list[torch.device]()
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: None)
    monkeypatch.setattr("runtime.distributed.set_default_timeout", lambda timeout: None)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(variable, "lo")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert init_distributed(Comm()) == torch.device("cuda", index)
    assert chosen == [torch.device("cuda", index)]
