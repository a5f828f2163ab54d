"""A run's plan beside its measurement."""

import os
import re
import shutil
import signal
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from metrics import planned_step
from metrics.planned_step import PlannedStep, start_plan
from runtime.devices import is_model
from tests.lib.patience import wait_until
from tests.lib.processes import is_running

pytestmark = pytest.mark.usefixtures("warm_starts")

CONFIG = Path("train_configs/debug_model.toml").read_text()
MEASURED = {"tokens_per_second": 1e6, "memory_gib": 1.5}


@pytest.fixture(autouse=True)
def priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests wait for plans."""
    monkeypatch.setattr(planned_step, "NICE", 0)


def text_of(planned: PlannedStep) -> str:
    try:
        assert planned.text(MEASURED) is None
        planned._process.wait()
        text = planned.text(MEASURED)
    finally:
        planned.close()
    assert text is not None
    return text


def test_plan_and_measurement_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    config = "[model]\nvocab_size = 320\n"
    pattern = (
        r"([\d,]+) tokens/s on NVIDIA H100 80GB SXM, measured 1,000,000 \(-(\d+) %\);"
        r" 0\.\d\d GiB of tensors at the peak, 1\.50 reserved"
    )
    rates = []
    # Both ranks on a node, or each on one of its own.
    for n_local in ("2", "1"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", n_local)
        text = text_of(PlannedStep(config, world_size=2, device_name="NVIDIA H100 80GB HBM3"))
        found = re.fullmatch(pattern, text)
        assert found is not None, text
        rates.append(int(found[1].replace(",", "")))
        assert 1e6 / rates[-1] == pytest.approx(1 - int(found[2]) / 100, abs=0.01)
    assert rates[1] < rates[0]


def fail_beside_a_plan(send: Connection) -> None:
    # A plan that does not end by itself.
    waits = "import signal; signal.pause()"
    program = planned_step.PROGRAM.replace("from tools.plan import main", waits)
    assert program != planned_step.PROGRAM
    planned_step.PROGRAM = program
    planned = PlannedStep(CONFIG, world_size=2, device_name="NVIDIA H100 80GB HBM3")
    send.send(planned._process.pid)
    os._exit(1)


def test_a_plan_ends_with_its_rank() -> None:
    context = get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    rank = context.Process(target=fail_beside_a_plan, args=(send,))
    rank.start()
    plan = receive.recv()
    rank.join()
    try:
        wait_until(lambda: not is_running(plan))
    finally:
        with suppress(ProcessLookupError):
            os.kill(plan, signal.SIGKILL)


def test_a_schedule_of_one_s_own_may_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = "print('Hello')\ndef up(step, total):\n    return step / total\n"
    (tmp_path / "printing_schedule.py").write_text(own)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    scheduler = '[lr_scheduler]\ndecay_type = "printing_schedule:up"\n'
    config = f"[model]\nvocab_size = 320\n{scheduler}"
    text = text_of(PlannedStep(config, world_size=1, device_name="NVIDIA H100 80GB HBM3"))
    assert "measured 1,000,000" in text


@pytest.mark.parametrize("content", [None, "Hello", "{}"])
def test_a_plan_that_cannot_be_read_is_none(content: str | None) -> None:
    planned = PlannedStep("", world_size=1, device_name="Tesla V100")
    planned._process.kill()
    planned._process.wait()
    planned._process.returncode = 0
    if content is None:
        shutil.rmtree(planned._out.parent)
    else:
        planned._out.write_text(content)
    text = planned.text(MEASURED)
    planned.close()
    assert text is not None
    assert text.startswith("none: ")


def test_a_plan_that_cannot_start_is_none(
    monkeypatch: pytest.MonkeyPatch, captured_log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    assert start_plan(CONFIG, world_size=1, device_name="NVIDIA H200") is None
    assert "plan: none: " in captured_log.text


def test_why_there_is_no_plan() -> None:
    config = "[model]\nvocab_size = 320\n"
    text = text_of(PlannedStep(config, world_size=1, device_name="Tesla V100"))
    assert text.startswith("none: --device: Tesla V100 is none of a100, ")


@pytest.mark.parametrize(
    ("title", "name", "is_one"),
    [
        ("NVIDIA H100 80GB HBM3", "h100", True),
        ("NVIDIA H200", "h200", True),
        ("NVIDIA GH200 480GB", "h200", False),
        ("NVIDIA GB200", "b200", False),
        ("NVIDIA GB200", "gb200", True),
        ("NVIDIA A100-SXM4-80GB", "a100", True),
        ("NVIDIA A100-SXM4-80GB", "a100_40gb", False),
        ("NVIDIA A100-SXM4-40GB", "a100_40gb", True),
        ("NVIDIA H100 PCIe", "h100_pcie", True),
        ("NVIDIA GeForce RTX 4090", "rtx4090", True),
        ("NVIDIA A10G", "a10g", True),
        ("NVIDIA L4", "l4", True),
        ("NVIDIA L40S", "l4", False),
        ("AMD Instinct MI300X", "mi300x", True),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "h100", False),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "a100", False),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx4090", False),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", "laptop", False),
        ("NVIDIA GeForce RTX 4090 D", "rtx4090", False),
        ("NVIDIA GeForce RTX 3090 Ti", "rtx3090", False),
    ],
)
def test_device_of_a_gpu(title: str, name: str, is_one: bool) -> None:
    assert is_model(title, name) == is_one
