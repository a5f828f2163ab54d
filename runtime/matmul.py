"""Float32 matrix products on a CPU: the fastest that are as accurate as float32 can be."""

import torch

from runtime.log import logger
from runtime.machine import cpu_is_intel

# Largest error over the largest element: float32 has 1e-6, TF32 5e-4, bfloat16 2e-3.
MOST_ERROR = 1e-5


def choose_float32_matmul() -> bool:
    """Take oneDNN's products, if they are accurate, on CPUs not by Intel, where MKL's are slow;
    return whether they were taken.

    On AMD they are 1.2 (Zen 4) to 1.8 times (Zen 5) as fast. PyTorch has them only under "medium",
    which permits rounding to bfloat16. A CPU without instructions for that computes in float32 all
    the same, so the result is tested, not trusted.
    """
    if cpu_is_intel():
        return False
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    error = float32_matmul_error()
    is_accurate = error <= MOST_ERROR
    if not is_accurate:
        torch.set_float32_matmul_precision(before)
    logger.info(
        "float32 products: %s (oneDNN's are off by %.0e here)",
        "oneDNN's" if is_accurate else "PyTorch's own",
        error,
    )
    return is_accurate


def float32_matmul_error() -> float:
    """The largest error in a product of random matrices, over its largest element."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 512, generator=generator) for _ in range(2))
    exact = a.double() @ b.double().T
    return ((a @ b.T - exact).abs().max() / exact.abs().max()).item()
