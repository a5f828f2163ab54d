"""PyTorch's settings of the process: a test that changes them would change later ones' results."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def restored_settings() -> Iterator[None]:
    """Restore at the end the settings that kernels and their results depend on."""
    settings = [
        (torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()),
        (torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled()),
        (torch.set_default_dtype, torch.get_default_dtype()),
        (torch.set_num_threads, torch.get_num_threads()),
    ]
    try:
        yield
    finally:
        for restore, value in settings:
            restore(value)
