"""Metrics of logged steps, on the console, in metrics.jsonl and in trackers."""

import json
import math
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from config.job_config import Metrics
from metrics.metrics_file import open_metrics
from metrics.trackers import Trackers
from runtime.log import duration, logger
from runtime.run_folder import LineFile


class Window(NamedTuple):
    """Consecutive steps on this rank."""

    steps: int
    seconds: float
    data_wait: float
    """Seconds of them in which the rank waited for data."""


class MetricsLogger:
    """Measures throughput and writes metrics. Only the rank with ``is_writer`` opens files.

    ``trackers``: closed with this logger; None on other ranks, and if none is configured.
    """

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
        trackers: Trackers | None = None,
    ) -> None:
        self._config, self._device, self._n_devices = config, device, n_devices
        self._flops, self._peak = flops_per_token, peak_flops
        self._file: LineFile | None = None
        self._trackers = trackers
        if is_writer:
            self._file, self._restarts = open_metrics(folder / "metrics.jsonl", resumed_step)
        # Seconds of steps that were logged, and of what was done between them.
        self._trained, self._excluded = 0.0, 0.0
        self._reset()

    def is_due(self, step: int) -> bool:
        return step == 1 or step % self._config.log_freq == 0

    def end_step(self, step: int, tokens: int, n_sequences: int, data_wait: float) -> None:
        """Count a step: its global tokens and sequences, and seconds this rank waited for data."""
        self._tokens += tokens
        self._sequences += n_sequences
        self._data_wait += data_wait
        self._steps += 1
        self._latest_sequences = n_sequences
        if self._trackers is not None:
            self._trackers.end_step(step)

    def exclude_first_step(self) -> None:
        """Exclude the steps since the last logged one: a start's first, which compiles."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._reset()

    def window(self) -> Window:
        """Return the steps since the last logged one."""
        return Window(self._steps, time.perf_counter() - self._since, self._data_wait)

    @contextmanager
    def exclude_from_throughput(self, *, waits: bool = True) -> Iterator[None]:
        """Exclude the time inside the context from throughput: validation, checkpoints.

        ``waits``: first for the steps that a GPU has queued. Otherwise they would run, and be
        excluded, during what waits for the device.
        """
        if waits and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        begin = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - begin
            self._since += seconds
            if self._trained > 0.0:
                self._excluded += seconds

    def log(self, step: int, steps_left: float, values: dict[str, float]) -> dict[str, Any]:
        """Write ``values`` (loss, grad_norm, lr, ...) and the throughput since the last call.

        Returns all that was written. ``steps_left``: remaining work, in steps of the latest size.
        """
        steps, elapsed, data_wait = self.window()
        rate = self._tokens / elapsed
        palm, causal = (self._utilization(flops, rate / self._n_devices) for flops in self._flops)
        record: dict[str, Any] = {
            "step": step,
            **values,
            "seconds_per_step": elapsed / steps,
            "tokens_per_second": rate,
            "mfu": palm,
            "mfu_causal": causal,
            "memory_gib": peak_memory_gib(self._device),
            "data_wait": data_wait / elapsed,
        }
        self._trained += elapsed
        # Validation and checkpoints go on to take their share.
        share = 1.0 + self._excluded / self._trained
        seconds_of_latest = elapsed * self._latest_sequences / self._sequences
        record["seconds_left"] = seconds_of_latest * steps_left * share
        self.write(record)
        logger.info(
            "step %5d  loss %7.4f  grad_norm %7.4f  lr %.2e  tokens/s %s  mfu %s  memory %.2f GiB"
            "  data %4.1f%%  left %s",
            step, values["loss"], values["grad_norm"], values["lr"], f"{rate:,.0f}",
            "n/a" if palm is None else f"{100 * palm:.1f}%", record["memory_gib"],
            100 * record["data_wait"], duration(record["seconds_left"]),
            extra={"event": {"metrics": record}},
        )  # fmt: skip
        self._reset()
        return record

    def log_validation(
        self,
        step: int,
        losses: Mapping[str, float],
        *,
        bits_per_nat: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Log nats per token by source label, and bits per byte if known; "" is all sources."""
        sources = "".join(f"  {label} {loss:.4f}" for label, loss in losses.items() if label)
        logger.info("step %5d  validation loss %.4f%s", step, losses[""], sources)
        values = {f"validation_loss/{label}": loss for label, loss in losses.items() if label}
        for label, factor in bits_per_nat.items():
            suffix = f"/{label}" if label else ""
            values[f"validation_bits_per_byte{suffix}"] = losses[label] * factor
        self.write({"step": step, "validation_loss": losses[""]} | values)

    def write(self, record: dict[str, Any]) -> None:
        """Append a line, with the time and the number of earlier starts that wrote lines."""
        if self._file is None:
            return
        # JSON has no NaN.
        finite = {k: v if v is None or math.isfinite(v) else None for k, v in record.items()}
        stamp = {"time": time.time(), "restarts": self._restarts}
        self._file.write(json.dumps(finite | stamp))
        if self._trackers is not None:
            values = {name: value for name, value in record.items() if name != "step"}
            self._trackers.log(record["step"], values)

    def text(self, name: str, text: str) -> None:
        """Add a text to the trackers, such as a sample."""
        if self._trackers is not None:
            self._trackers.text(name, text)

    def close(self) -> None:
        """Close the file, and let the trackers finish."""
        if self._file is not None:
            self._file.close()
        if self._trackers is not None:
            self._trackers.finish()

    def _reset(self) -> None:
        self._since, self._data_wait = time.perf_counter(), 0.0
        self._steps, self._tokens, self._sequences, self._latest_sequences = 0, 0, 0, 0

    def _utilization(self, flops_per_token: float, rate_per_device: float) -> float | None:
        return None if self._peak is None else flops_per_token * rate_per_device / self._peak


def peak_memory_gib(device: torch.device) -> float:
    """Return peak memory in GiB: of the CUDA allocator or, on a CPU, of the process (RSS)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    # ru_maxrss is in KiB on Linux, in bytes on macOS.
    bytes_per_unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * bytes_per_unit / 2**30
