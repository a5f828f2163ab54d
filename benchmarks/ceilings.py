"""Peak matmul and memory-copy rates of a machine.

Measured on random data, because GPUs multiply zeros faster: they take less power.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Literal

import torch

from benchmarks.rows import Row
from config.job_config import Count, Section
from metrics.flops import peak_flops
from runtime.compat import scaled_mm
from runtime.printable import first_line

# Seconds between two waits for the device.
AT_LEAST = 0.02


class Case(Section):
    matmul: list[Literal["float32", "bfloat16", "float8_e4m3fn"]]
    sizes: list[Count]
    """n of an n x n x n matmul."""
    copy_mib: Count
    seconds: float
    """Time per measurement; at least one call is made."""


def run(case: Case) -> Iterator[Row]:
    """Yield a row per dtype and size, and one for the copy."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    peak = peak_flops(device, None)
    for name in case.matmul:
        for n in case.sizes:
            a, b = (torch.randn(n, n, device=device).to(getattr(torch, name)) for _ in "ab")
            try:
                seconds = sustained(build_matmul(a, b), case.seconds, device)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                problem = f"skipped: {first_line(str(error))[:120]}"
                yield {"what": f"{name} product, {n:,}", "problem": problem}
                continue
            rate = 2 * n**3 / seconds
            share = {"share_of_peak": peak and rate / peak}
            yield {"what": f"{name} product, {n:,}", "tflops_per_second": rate / 1e12} | share
    source = torch.randn(case.copy_mib * 2**18, device=device)
    target = torch.empty_like(source)
    seconds = sustained(lambda: target.copy_(source), case.seconds, device)
    rate = 2 * source.nbytes / seconds / 1e9
    yield {"what": f"copy, {case.copy_mib} MiB", "gb_per_second": rate}


def build_matmul(a: torch.Tensor, b: torch.Tensor) -> Callable[[], object]:
    """Return a call that computes ``a @ b``; float8 inputs use ``_scaled_mm`` with scale 1."""
    if a.dtype.itemsize > 1:
        return lambda: a @ b
    one, column_major, matmul = torch.ones((), device=a.device), b.t(), scaled_mm()
    return lambda: matmul(
        a, column_major, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def sustained(call: Callable[[], object], limit: float, device: torch.device) -> float:
    """Median seconds of the calls within ``limit`` seconds, after two warmup calls.

    Not the fastest: under load a GPU's clocks fall within seconds.
    """

    def seconds_of(n_calls: int) -> float:
        begin = time.perf_counter()
        for _ in range(n_calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) / n_calls

    seconds_of(1)
    # Enough that waiting for the device does not count.
    n_calls = max(1, round(AT_LEAST / seconds_of(1)))
    end = time.perf_counter() + limit
    found = [seconds_of(n_calls)]
    while time.perf_counter() < end:
        found.append(seconds_of(n_calls))
    return statistics.median(found)
