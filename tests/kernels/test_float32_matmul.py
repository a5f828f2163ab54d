import os
import subprocess
import sys

import pytest

SCRIPT = """
import torch
from kernels import float32_matmul

for is_intel in (True, False):
    float32_matmul.cpu_is_intel = lambda: is_intel
    float32_matmul.choose_float32_matmul()
    print(torch.get_float32_matmul_precision())
print(float32_matmul.float32_matmul_error())
"""


# Without AMX, and with this machine's instructions.
@pytest.mark.parametrize("environment", [{"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, {}])
def test_matmuls_have_float32_accuracy(environment: dict[str, str]) -> None:
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    with_mkl, precision, error = process.stdout.split()
    assert float(error) <= 2e-6
    if environment:
        assert (with_mkl, precision) == ("highest", "medium")
