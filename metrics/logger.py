"""Metrics of logged steps, on the console, in metrics.jsonl and in TensorBoard."""

import json
import math
import resource
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

import torch

from config.job_config import Metrics
from runtime.filesystem import (
    atomic_write_text,
    make_folder,
    open_file,
    parse_object,
    read_file,
)
from runtime.log import duration, logger


class MetricsLogger:
    """Measures throughput and writes metrics. Only the rank with ``is_writer`` opens files."""

    def __init__(
        self,
        folder: Path,
        config: Metrics,
        *,
        is_writer: bool,
        device: torch.device,
        n_devices: int,
        flops_per_token: tuple[float, float],
        peak_flops: float | None,
        resumed_step: int | None = None,
    ) -> None:
        self._config, self._device, self._n_devices = config, device, n_devices
        self._flops, self._peak = flops_per_token, peak_flops
        has_tensorboard = is_writer and config.enable_tensorboard
        path = folder / "metrics.jsonl"
        # Counted before _open_log drops the lines of steps that will be repeated.
        self._restarts = _count_starts(path) if is_writer else 0
        self._file = _open_log(path, resumed_step) if is_writer else None
        self._tensorboard = _open_tensorboard(folder, resumed_step) if has_tensorboard else None
        self._reset()

    def is_due(self, step: int) -> bool:
        return step == 1 or step % self._config.log_freq == 0

    def count(self, tokens: int, data_wait: float) -> None:
        """Count one step: its global tokens, and the seconds this rank waited for data."""
        self._tokens += tokens
        self._data_wait += data_wait
        self._steps += 1

    @contextmanager
    def exclude_from_throughput(self) -> Iterator[None]:
        """Exclude the time inside the context from throughput: validation, checkpoints."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - begin

    def log(self, step: int, steps_left: float, values: dict[str, float]) -> None:
        """Write ``values`` (loss, grad_norm, lr, ...) and the throughput since the last call.

        ``steps_left``: remaining work, in steps of the latest step's size.
        """
        elapsed = time.perf_counter() - self._since
        rate = self._tokens / elapsed
        palm, causal = (self._utilization(flops, rate / self._n_devices) for flops in self._flops)
        record: dict[str, Any] = {
            "step": step,
            **values,
            "seconds_per_step": elapsed / self._steps,
            "tokens_per_second": rate,
            "mfu": palm,
            "mfu_causal": causal,
            "memory_gib": peak_memory_gib(self._device),
            "data_wait": self._data_wait / elapsed,
        }
        seconds_left = record["seconds_per_step"] * steps_left
        self.write(record)
        logger.info(
            "step %5d  loss %7.4f  grad_norm %7.4f  lr %.2e  tokens/s %s  mfu %s  memory %.2f GiB"
            "  data %4.1f%%  left %s",
            step, values["loss"], values["grad_norm"], values["lr"], f"{rate:,.0f}",
            "n/a" if palm is None else f"{100 * palm:.1f}%", record["memory_gib"],
            100 * record["data_wait"], duration(seconds_left),
        )  # fmt: skip
        self._reset()

    def log_validation(
        self, step: int, losses: Mapping[str, float], *, bits_per_nat: float | None = None
    ) -> None:
        """Log nats per token by source label; "" is all sources, also in bits per byte."""
        sources = "".join(f"  {label} {loss:.4f}" for label, loss in losses.items() if label)
        logger.info("step %5d  validation loss %.4f%s", step, losses[""], sources)
        values = {f"validation_loss/{label}": loss for label, loss in losses.items() if label}
        if bits_per_nat is not None:
            values["validation_bits_per_byte"] = losses[""] * bits_per_nat
        self.write({"step": step, "validation_loss": losses[""]} | values)

    def write(self, record: dict[str, Any]) -> None:
        """Append a line, with the time and the number of earlier starts that wrote lines."""
        if self._file is None:
            return
        with _logging_os_errors(f"metrics of step {record['step']}"):
            # JSON has no NaN.
            finite = {k: v if v is None or math.isfinite(v) else None for k, v in record.items()}
            stamp = {"time": time.time(), "restarts": self._restarts}
            self._file.write(json.dumps(finite | stamp) + "\n")
            self._file.flush()
            if self._tensorboard is None:
                return
            for name, value in record.items():
                if name != "step" and value is not None:
                    self._tensorboard.add_scalar(name, value, record["step"])

    def close(self) -> None:
        for writer in (self._file, self._tensorboard):
            if writer is not None:
                with _logging_os_errors("the last metrics"):
                    writer.close()

    def _reset(self) -> None:
        self._since, self._tokens, self._data_wait, self._steps = time.perf_counter(), 0, 0.0, 0

    def _utilization(self, flops_per_token: float, rate_per_device: float) -> float | None:
        return None if self._peak is None else flops_per_token * rate_per_device / self._peak


@contextmanager
def _logging_os_errors(what: str) -> Iterator[None]:
    """Log an ``OSError`` and continue, because a full disk may have room again later."""
    try:
        yield
    except OSError as error:
        logger.error("ALARM: %s were not written: %s", what, error)


def peak_memory_gib(device: torch.device) -> float:
    """Return peak memory in GiB: of the CUDA allocator or, on a CPU, of the process (RSS)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    # ru_maxrss is in KiB on Linux, in bytes on macOS.
    bytes_per_unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * bytes_per_unit / 2**30


def _open_log(path: Path, resumed_step: int | None) -> TextIO:
    """Open the log to append; drop torn lines and steps that a resumed run will repeat."""
    if path.exists():
        steps = ((line + "\n", _step_of(line)) for line in _lines_of(path))
        last = math.inf if resumed_step is None else resumed_step
        atomic_write_text(path, "".join(line for line, step in steps if step <= last))
    return TextIOWrapper(open_file(path, "ab+"), encoding="utf-8")


def _step_of(line: str) -> float:
    """Return the step of a line; NaN, for which ``<=`` is false, if the line is torn."""
    step = parse_object(line).get("step")
    return step if type(step) is int else math.nan


def _count_starts(path: Path) -> int:
    """Count the starts of the run that have written lines."""
    if not path.exists():
        return 0
    records = (parse_object(line) for line in _lines_of(path) if not math.isnan(_step_of(line)))
    counts = (record.get("restarts", 0) for record in records)
    return max((count + 1 for count in counts if type(count) is int), default=0)


def _lines_of(path: Path) -> list[str]:
    return read_file(path).decode(errors="replace").split("\n")


def _open_tensorboard(folder: Path, resumed_step: int | None) -> Any:
    # The import is slow, and TensorBoard is optional.
    from torch.utils.tensorboard import SummaryWriter

    purged = None if resumed_step is None else resumed_step + 1
    make_folder(folder / "tensorboard")
    # A random name, because the writer would follow a link of that name.
    suffix = f".{uuid.uuid4().hex}"
    return SummaryWriter(str(folder / "tensorboard"), purge_step=purged, filename_suffix=suffix)
