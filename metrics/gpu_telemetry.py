"""Clocks, power, temperature and memory errors of this rank's GPU, by nvidia-ml-py if installed."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self

import torch

from runtime.compat import is_installed
from runtime.log import logger

# Bits of NVML's clocks event reasons that mean a problem. Not the power cap, which a GPU at full
# load reaches, and not idle.
THROTTLES = {
    0x08: "hardware slowdown",
    0x20: "too hot (software)",
    0x40: "too hot (hardware)",
    0x80: "power brake",
}
CLOCK, POWER, TEMPERATURE = "gpu_clock_mhz", "gpu_power_w", "gpu_temperature_c"
ECC, REASONS = "gpu_ecc_errors", "gpu_throttle_reasons"


class GpuTelemetry:
    """Reads a GPU in a thread, because a driver call may take long: no step waits for it."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._reading = self._begin()

    @classmethod
    def open(cls, device: torch.device) -> Self | None:
        """Telemetry of ``device``; None on a CPU, or if nvidia-ml-py or the driver lack it."""
        if device.type != "cuda" or not is_installed("pynvml"):
            return None
        import pynvml

        try:
            pynvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(device).uuid
            # CUDA's indices differ from NVML's.
            return cls(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
        except (pynvml.NVMLError, AttributeError) as error:
            logger.info("gpu telemetry: not available: %s", error)
            return None

    def sample(self) -> dict[str, float]:
        """Return the last reading, {} if it is not done, and begin another."""
        if not self._reading.done():
            return {}
        found = self._reading.result()
        self._reading = self._begin()
        return found

    def _begin(self) -> Future[dict[str, float]]:
        reading: Future[dict[str, float]] = Future()

        def read() -> None:
            try:
                reading.set_result(self._read())
            except Exception as error:
                reading.set_exception(error)

        # An executor's thread would keep a rank from exiting while the driver hangs.
        threading.Thread(target=read, name="gpu telemetry", daemon=True).start()
        return reading

    def _read(self) -> dict[str, float]:
        nvml, handle = self._nvml, self._handle
        # Older packages have only the second name.
        names = (
            "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlDeviceGetCurrentClocksThrottleReasons",
        )
        name = next((name for name in names if hasattr(nvml, name)), "")
        calls: dict[str, Callable[[], float]] = {
            CLOCK: lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            POWER: lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            TEMPERATURE: lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            ECC: lambda: nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
            REASONS: lambda: getattr(nvml, name)(handle),
        }
        found = {}
        for key, call in calls.items():
            try:
                found[key] = float(call())
            # Not every GPU has each of them; a reading is never worth an error.
            except Exception:
                continue
        return found


def summarize_gpus(
    ranks: Sequence[Mapping[str, float]],
) -> tuple[dict[str, float], dict[str, tuple[bool, str]]]:
    """Metrics of all ranks' GPUs, and of each kind of alarm: is it one, and its line.

    The lowest clock, the highest temperature, the mean power and the sum of memory errors.
    """
    values = {
        key: {rank: each[key] for rank, each in enumerate(ranks) if key in each}
        for key in (CLOCK, POWER, TEMPERATURE, ECC, REASONS)
    }
    combine: dict[str, Callable[[Any], float]] = {
        CLOCK: min, TEMPERATURE: max, POWER: lambda found: sum(found) / len(found), ECC: sum
    }  # fmt: skip
    metrics = {
        key: float(how(list(values[key].values()))) for key, how in combine.items() if values[key]
    }
    alarms = {}
    for bit, reason in THROTTLES.items():
        slow = [rank for rank, bits in values[REASONS].items() if int(bits) & bit]
        text = f"the GPU of {_ranks(slow)} lowers its clock: {reason}" if slow else ""
        if slow and (clock := values[CLOCK].get(slow[0])) is not None:
            text += f"; {clock:.0f} MHz, the fastest has {max(values[CLOCK].values()):.0f}"
        alarms[f"throttle {bit}"] = (bool(slow), text)
    broken = [rank for rank, count in values[ECC].items() if count > 0]
    text = f"the GPU of {_ranks(broken)} has uncorrected memory errors: replace it"
    alarms["ecc"] = (bool(broken), text if broken else "")
    return metrics, alarms


def _ranks(ranks: list[int]) -> str:
    others = f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
    return f"rank {ranks[0]}{others}" if ranks else ""
