"""Process groups have the configured timeout."""

import subprocess
import sys

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
