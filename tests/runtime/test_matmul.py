import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
import torch
from runtime import matmul

matmul.cpu_is_intel = lambda: "intel" in sys.argv
matmul.choose_float32_matmul()
print(torch.get_float32_matmul_precision(), matmul.float32_matmul_error())
"""


def chosen(*maker: str, **environment: str) -> tuple[str, float]:
    """What a process of that environment computes with, and the error of its products."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *maker],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    precision, error = done.stdout.split()
    return precision, float(error)


# Without AMX, and with whatever this machine has.
@pytest.mark.parametrize("environment", [{"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, {}])
def test_products_have_the_accuracy_of_float32(environment: dict[str, str]) -> None:
    precision, error = chosen(**environment)
    assert error <= 2e-6
    if environment:
        assert precision == "medium"


def test_intel_keeps_mkl() -> None:
    assert chosen("intel", ONEDNN_MAX_CPU_ISA="AVX512_CORE")[0] == "highest"
