"""Each planted trouble is logged once, with the key that changes it; healthy steps log nothing."""

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from metrics import gpu_telemetry, slow_steps
from metrics.gpu_telemetry import GpuTelemetry, summarize_gpus
from metrics.logger import Window
from metrics.slow_steps import Notices, SlowSteps
from runtime.log import logger

CPU, GPU = torch.device("cpu"), torch.device("cuda")
HEALTHY: dict[str, Any] = {"data_wait": 0.02, "gc": 0.0, "retries": 0.0, "recompiled": ""}


@contextmanager
def watched(
    device: torch.device = CPU,
    *others: dict[str, Any],
    gc_freq: int = 1,
    is_resumed: bool = False,
) -> Iterator[tuple[Any, list]]:
    """Watch this process as rank 0 beside ``others``; yield it and the lines that it logs."""
    lines: list[str] = []

    def log(text: str, *values: Any) -> None:
        lines.append(text % values)

    with (
        patch.object(slow_steps, "all_gather_object", lambda own: [own, *others]),
        patch.object(logger, "warning", log),
        patch.object(logger, "error", log),
    ):
        slow = SlowSteps(device, gc_freq=gc_freq, is_writer=True, is_resumed=is_resumed)
        try:
            yield slow, lines
        finally:
            slow.close()


def end_windows(slow: SlowSteps, *data_waits: float) -> None:
    for data_wait in data_waits:
        end_window(slow, data_wait=data_wait)


def end_window(
    slow: SlowSteps, step: int = 1, *, seconds: float = 10.0, data_wait: float = 0.0
) -> dict[str, float]:
    """End a window of one step."""
    slow.end_step()
    return slow.end_window(step, Window(1, seconds, data_wait), steps_left=1000)


def test_slow_data_are_logged_once_while_they_last() -> None:
    with watched() as (slow, lines):
        end_windows(slow, 9.0, 0.9)
        assert lines == [], "the first window has nothing read ahead"
        end_windows(slow, 3.4, 3.0, 2.5)
        [line] = lines
    assert line.startswith("slow: rank 0 waited for data in 34 % of the time")
    assert "data.prefetch" in line


def test_slow_data_of_another_rank_are_logged() -> None:
    with watched(CPU, HEALTHY, HEALTHY | {"data_wait": 0.5}) as (slow, lines):
        end_windows(slow, 0.0, 0.0)
    assert "rank 2 waited for data in 50 %" in lines[0]


def test_garbage_collection_is_measured() -> None:
    with watched() as (slow, lines):
        end_windows(slow, 0.0)
        gc.collect()
        end_window(slow, seconds=1e-6)
    assert "training.gc_freq" in lines[0]
    assert slow._on_gc not in gc.callbacks


def test_collections_of_what_the_profiler_left_are_not_the_steps() -> None:
    with watched() as (slow, lines):
        end_windows(slow, 0.0)
        with slow.without_gc():
            gc.collect()
        end_window(slow, seconds=1e-6)
    assert lines == []


def test_a_collection_counts_for_all_steps_up_to_the_next() -> None:
    with watched(gc_freq=50) as (slow, lines):
        for step in range(1, 101):
            if step % 50 == 0:
                slow._gc_seconds += 0.2
            end_window(slow, step, seconds=0.1)
        assert lines == [], "4 % of the time, but two steps in one"
        slow._gc_seconds += 50 * 0.1 * slow_steps.GC + 0.001
        for step in range(101, 151):
            end_window(slow, step, seconds=0.1)
    assert len(lines) == 1


@pytest.mark.parametrize("is_resumed", [False, True])
def test_slow_saves_are_logged(is_resumed: bool) -> None:
    times = iter([100.0, 200.0, 260.0, 320.0, 324.0, 400.0])
    clock = SimpleNamespace(perf_counter=lambda: next(times), monotonic=lambda: 0.0)
    with patch.object(slow_steps, "time", clock), watched(is_resumed=is_resumed) as (slow, lines):
        if is_resumed:
            # The time since the one before is not known.
            slow.end_save(99.0)
        slow.end_save(9.9)
        assert lines == []
        slow.end_save(30.0)
        slow.end_save(30.0)
        [line] = lines
        slow.end_save(3.9)
        slow.end_save(7.5)
    assert line.startswith("slow: saving a checkpoint took 30 s, 50 % of the time")
    assert len(lines) == 1, "most of 4 s, and a tenth of 76"


def test_a_full_gpu_is_logged() -> None:
    retries = iter([0, 0, 3])
    with (
        patch.object(SlowSteps, "_alloc_retries", lambda self: next(retries)),
        watched() as (
            slow,
            lines,
        ),
    ):
        end_windows(slow, 0.0, 0.0)
    assert "freed its cache 3 times" in lines[0]
    assert "training.local_batch_size" in lines[0]


def test_what_comes_and_goes_is_not_repeated() -> None:
    with patch("metrics.slow_steps.time.monotonic") as clock:
        notices, clock.return_value = Notices(), 0.0
        found = [notices.is_new("data", is_present) for is_present in (True, False, True)]
        # What goes on is repeated once, when the time is over.
        clock.return_value = slow_steps.QUIET_SECONDS
        found += [notices.is_new("data", is_present) for is_present in (True, True, False, True)]
    assert found == [True, False, False, True, False, False, False]


class Growing(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.fixture
def model() -> Iterator[torch.nn.Module]:
    torch.compiler.reset()
    model = Growing()
    model.compile(backend="eager", fullgraph=True, dynamic=False)
    yield model
    torch.compiler.reset()


def test_recompilation_in_consecutive_steps_is_an_alarm(model: torch.nn.Module) -> None:
    with watched() as (slow, lines):
        for size in (3, 4, 5, 6):
            model(torch.ones(size))
            slow.end_step()
    [line] = lines
    assert line.startswith("ALARM: torch.compile recompiles in every step")
    assert "test_slow_steps.py" in line
    assert "size mismatch at index 0. expected 4, actual 5" in line
    assert "compile.enable" in line


def test_recompilation_of_another_rank_is_an_alarm_of_rank_0(model: torch.nn.Module) -> None:
    with watched(CPU, HEALTHY | {"recompiled": "torch.compile recompiles"}) as (slow, lines):
        end_windows(slow, 0.0, 0.0)
    assert lines == ["ALARM: rank 1: torch.compile recompiles"]
    with watched(CPU, HEALTHY | {"recompiled": "torch.compile recompiles"}) as (slow, lines):
        for size in (3, 4, 5):
            model(torch.ones(size))
            slow.end_step()
        end_windows(slow, 0.0)
    [line] = lines
    assert line.startswith("ALARM: torch.compile recompiles in every step")


def test_validation_that_compiles_once_is_no_alarm(model: torch.nn.Module) -> None:
    with watched() as (slow, lines):
        for size in (3, 3, 4, 3, 4, 3, 5, 3):
            model(torch.ones(size))
            slow.end_step()
    assert lines == []


class NVMLError(Exception):
    pass


def fake_pynvml(readings: list[dict[str, Any]], *, missing: bool = False) -> ModuleType:
    """NVML with one reading per sample; the GPU has no counter of memory errors."""
    nvml: Any = ModuleType("pynvml")
    nvml.NVMLError, nvml.NVML_CLOCK_SM, nvml.NVML_TEMPERATURE_GPU = NVMLError, 1, 0
    nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC = 1, 0

    def init() -> None:
        if missing:
            raise NVMLError("driver not loaded")

    def ecc(*arguments: Any) -> int:
        raise NVMLError("not supported")

    nvml.nvmlInit = init
    nvml.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    nvml.nvmlDeviceGetClockInfo = lambda handle, kind: readings[0]["clock"]
    nvml.nvmlDeviceGetPowerUsage = lambda handle: 1000 * readings[0]["power"]
    nvml.nvmlDeviceGetTemperature = lambda handle, kind: readings[0]["temperature"]
    nvml.nvmlDeviceGetTotalEccErrors = ecc
    nvml.nvmlDeviceGetCurrentClocksEventReasons = lambda handle: readings.pop(0)["reasons"]
    return nvml


@contextmanager
def gpu_with(nvml: ModuleType) -> Iterator[None]:
    properties = SimpleNamespace(uuid="1234")
    with (
        patch.dict(sys.modules, {"pynvml": nvml}),
        patch.object(gpu_telemetry, "is_installed", lambda package: True),
        patch.object(torch.cuda, "get_device_properties", lambda device: properties),
        patch.object(SlowSteps, "_alloc_retries", lambda self: 0),
    ):
        yield


def test_gpu_is_read_in_a_thread_and_throttling_is_an_alarm() -> None:
    cool = {"clock": 1980, "power": 690.0, "temperature": 60, "reasons": 0x4}
    hot = {"clock": 1200, "power": 400.0, "temperature": 92, "reasons": 0x4 | 0x40}
    other = HEALTHY | {"gpu_clock_mhz": 1980.0, "gpu_power_w": 600.0, "gpu_temperature_c": 65.0}
    found = []
    with gpu_with(fake_pynvml([cool, hot, cool])), watched(GPU, other) as (slow, lines):
        assert slow._telemetry is not None
        for _ in range(2):
            slow._telemetry._reading.result()
            found.append(end_window(slow))
    assert found[0] == {"gpu_clock_mhz": 1980, "gpu_temperature_c": 65, "gpu_power_w": 645}
    assert found[1] == {"gpu_clock_mhz": 1200, "gpu_temperature_c": 92, "gpu_power_w": 500}
    [line] = lines
    assert line == (
        "ALARM: the GPU of rank 0 lowers its clock: too hot (hardware); 1200 MHz, the fastest has"
        " 1980"
    )


def test_a_slow_driver_delays_no_step() -> None:
    release = threading.Event()
    reading = {"clock": 1, "power": 1.0, "temperature": 1, "reasons": 0}
    nvml: Any = fake_pynvml([reading, reading])
    nvml.nvmlDeviceGetClockInfo = lambda handle, kind: release.wait(60)
    with gpu_with(nvml):
        telemetry = GpuTelemetry.open(GPU)
        assert telemetry is not None
        assert telemetry.sample() == {}
        # Nor does it keep a rank from exiting.
        reading_threads = [each for each in threading.enumerate() if each.name == "gpu telemetry"]
        assert all(each.daemon for each in reading_threads)
        assert reading_threads
        release.set()
        assert telemetry._reading.result()["gpu_power_w"] == 1.0


def test_without_driver_or_package_there_is_no_telemetry() -> None:
    with gpu_with(fake_pynvml([], missing=True)), patch.object(logger, "info") as info:
        assert GpuTelemetry.open(GPU) is None
    assert "driver not loaded" in str(info.call_args)
    with patch.object(gpu_telemetry, "is_installed", lambda package: False):
        assert GpuTelemetry.open(GPU) is None
    assert GpuTelemetry.open(CPU) is None


def test_memory_errors_are_an_alarm() -> None:
    metrics, alarms = summarize_gpus([{"gpu_ecc_errors": 0.0}, {"gpu_ecc_errors": 2.0}, {}])
    assert metrics == {"gpu_ecc_errors": 2.0}
    assert alarms["ecc"] == (
        True,
        "the GPU of rank 1 has uncorrected memory errors: replace it",
    )
