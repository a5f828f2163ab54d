import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
import torch
from kernels import float32_matmul

float32_matmul.cpu_is_intel = lambda: "intel" in sys.argv
float32_matmul.choose_float32_matmul()
print(torch.get_float32_matmul_precision(), float32_matmul.float32_matmul_error())
"""


def run_process(*maker: str, **environment: str) -> tuple[str, float]:
    """Return the precision setting and matmul error of a process with this environment."""
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, *maker],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    precision, error = process.stdout.split()
    return precision, float(error)


# Without AMX, and with this machine's instructions.
@pytest.mark.parametrize("environment", [{"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, {}])
def test_matmuls_have_float32_accuracy(environment: dict[str, str]) -> None:
    precision, error = run_process(**environment)
    assert error <= 2e-6
    if environment:
        assert precision == "medium"


def test_intel_uses_mkl() -> None:
    assert run_process("intel", ONEDNN_MAX_CPU_ISA="AVX512_CORE")[0] == "highest"
