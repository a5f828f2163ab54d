"""Properties and settings of this machine that need PyTorch; ``machine.py`` has the others."""

import os
import platform
from pathlib import Path

import torch

from runtime.compat import find


def gpu_has_bfloat16() -> bool:
    """True if the GPU multiplies bfloat16 (from A100 on); a T4 or V100 only emulates it."""
    return torch.cuda.is_bf16_supported(including_emulation=False)


def cpu_has_bfloat16() -> bool:
    """True if this CPU has bfloat16 matmul instructions (AVX-512 BF16 or AMX)."""
    probes = (find("torch.cpu:_is_avx512_bf16_supported"), find("torch.cpu:_is_amx_tile_supported"))
    return any(probe() for probe in probes if probe is not None)


def device_name(device: torch.device) -> str:
    """Model of the GPU or CPU; the CPU's architecture where the OS does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def lacks_float8() -> bool:
    """True if this machine's GPU has no float8 matmuls of these formats.

    Such as those of a compute capability below 8.9, and AMD's MI300, whose formats are others.
    """
    if not torch.cuda.is_available():
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability() < (8, 9)


def machine_facts() -> dict[str, bool]:
    """Arguments of ``check_constraints`` for a run that trains on this machine."""
    return {"has_gpu": torch.cuda.is_available(), "lacks_float8": lacks_float8()}


def enable_expandable_segments() -> None:
    """Set ``expandable_segments:True`` for processes started from now on, unless the user set the
    CUDA allocator's options.

    Fixed-size segments fragment if tensor sizes vary, as with documents or tokens per expert.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is the older name
    if torch.cuda.is_available() and not os.environ.keys() & names:
        os.environ[names[0]] = "expandable_segments:True"
