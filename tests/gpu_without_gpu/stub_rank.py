"""A rank of train.py on the stub: ``python -m tests.gpu_without_gpu.stub_rank REPORT ARGUMENTS``

Appends a JSON line per step to REPORT. Every value that a device computes reads as zero, so this
file replaces the few places where control flow depends on one.
"""

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from kernels import kernel_check

Tensors = tuple[torch.Tensor | int | None, ...]


class Recorder:
    """Writes what each step did; a step begins where it asks for its batch."""

    def __init__(self, report: Path) -> None:
        self._report, self._counters = report, report.with_suffix(".counters")
        self._stub = ctypes.CDLL(os.environ["LD_PRELOAD"])
        self._began, self._cpu = time.perf_counter(), time.process_time()

    def count(self, name: str) -> None:
        self._stub.count_call(b"kernel", name.encode())

    def end_step(self) -> None:
        seconds = time.perf_counter() - self._began
        assert self._stub.gpu_stub_take(os.fsencode(self._counters)) == 0, self._counters
        lines = [line.split("\t") for line in self._counters.read_text().splitlines()]
        stats = torch.cuda.memory_stats()
        record = {
            "seconds": seconds,
            "cpu_seconds": time.process_time() - self._cpu,
            "allocated": torch.cuda.memory_allocated(),
            "peak_allocated": torch.cuda.max_memory_allocated(),
            "peak_reserved": torch.cuda.max_memory_reserved(),
            "retries": stats.get("num_alloc_retries", 0),
            "counters": [[kind, name, int(n), int(size)] for n, size, kind, name in lines],
        }
        with self._report.open("a") as file:
            file.write(json.dumps(record) + "\n")
        torch.cuda.reset_peak_memory_stats()
        self._began, self._cpu = time.perf_counter(), time.process_time()


def replace_cudnn_attention(recorder: Recorder) -> torch.library.Library:
    """Allocate what cuDNN's attention does. The registration ends with the returned object."""

    def forward(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
        compute_log_sumexp: bool,
        *options: Any,
        scale: float | None = None,
    ) -> Tensors:
        recorder.count("cudnn_attention_forward")
        b, h, s, _ = q.shape
        log_sumexp = q.new_empty((b, h, s, 1) if compute_log_sumexp else 0, dtype=torch.float32)
        seed, offset = (q.new_empty((), dtype=torch.int64) for _ in range(2))
        return torch.empty_like(q), log_sumexp, None, None, s, k.shape[2], seed, offset, None

    def backward(
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *saved: Any,
        scale: float | None = None,
    ) -> Tensors:
        recorder.count("cudnn_attention_backward")
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_cudnn_attention", forward, "CUDA")
    library.impl("_scaled_dot_product_cudnn_attention_backward", backward, "CUDA")
    return library


def run_checks_without_result() -> None:
    """Run both kernels of every numerics check, but do not compare zeros with zeros."""
    check = kernel_check.assert_kernel_matches

    def run(*arguments: Any) -> None:
        with suppress(ArithmeticError):
            check(*arguments)

    kernel_check.assert_kernel_matches = run


def balance_experts() -> None:
    """Give each rank of an expert-parallel dispatch the same number of tokens."""
    from parallelisms.expert_parallel import AllToAllDispatcher

    forward = AllToAllDispatcher.forward

    def balanced(self: Any, x: torch.Tensor, *others: Any) -> torch.Tensor:
        with counts_of(len(x), self.degree):
            return forward(self, x, *others)

    AllToAllDispatcher.forward = balanced


@contextmanager
def counts_of(n_tokens: int, degree: int) -> Iterator[None]:
    """Return from ``tolist`` of (2, degree) counts on the device equal shares of ``n_tokens``."""
    read = torch.Tensor.tolist
    counts = [n_tokens // degree + (rank < n_tokens % degree) for rank in range(degree)]

    def tolist(self: torch.Tensor) -> Any:
        values = read(self)
        return [counts, counts] if self.shape == (2, degree) else values

    with patch.object(torch.Tensor, "tolist", tolist):
        yield


def assume_a_bandwidth() -> None:
    """Assume a bandwidth in a warning at the start: ranks would agree on zero."""
    from parallelisms import comm_volume

    comm_volume._bus_bandwidth = lambda mesh: 1e11


def send_objects_by_host() -> None:
    """Send objects between pipeline stages through gloo: by NCCL they would be zeros."""
    for name in ("send_object_list", "recv_object_list"):
        setattr(dist, name, partial(by_host, getattr(dist, name)))


def by_host(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return function(*arguments, **options | {"device": torch.device("cpu")})


def main(report: Path, arguments: list[str]) -> int:
    recorder = Recorder(report)
    registration = replace_cudnn_attention(recorder)
    run_checks_without_result()
    send_objects_by_host()
    # Its kernel is compiled by NVRTC at run time, which needs a driver.
    torch.special.ndtri = torch.sigmoid
    # Only now, because modules import the check by name.
    import train
    from data.step_batches import StepBatches
    from runtime.log import init_logging

    balance_experts()
    assume_a_bandwidth()
    take = StepBatches.next

    def next_batch(self: StepBatches, *args: Any, **options: Any) -> Any:
        recorder.end_step()
        return take(self, *args, **options)

    StepBatches.next = next_batch
    init_logging()
    code = train.start(arguments)
    recorder.end_step()
    del registration
    return code


if __name__ == "__main__":
    code = main(Path(sys.argv[1]), sys.argv[2:])
    sys.stdout.flush()
    # CUDA's libraries unload in an order that needs a driver.
    os._exit(code)
