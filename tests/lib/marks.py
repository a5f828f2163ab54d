"""Marks of parametrized cases."""

import os
from functools import partial

import pytest
import torch

slow = partial(pytest.param, marks=pytest.mark.slow)


def skip_without_gpus(count: int) -> None:
    """Skip the test unless each of ``count`` ranks has a GPU, or NCCL lets them share GPUs."""
    found = torch.cuda.device_count()
    is_shared = found > 0 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if found < count and not is_shared:
        pytest.skip(f"needs {count} GPUs, or one and NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30)")
