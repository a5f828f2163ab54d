"""Peak memory: each published size in few layers, and what is committed for one GPU."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.loops import keys_of
from benchmarks.rows import ROOT
from benchmarks.run import build_case, load_cases
from config import load_config
from config.auto import MODE, SIZE
from models import MODEL_SPECS, find_model
from models.meta import build_on_meta
from tests.gpu_without_gpu.stub_run import (
    GIB,
    GRAPHS,
    H100,
    H200,
    N_STEPS,
    Device,
    stub_variables,
    train_on_stub,
)

DEVICES = {"h200": H200, "h100": H100}
LAYERS = 2
# More than any GPU has: these tests ask what a size needs.
LARGE = Device("NVIDIA H200", 2**41)
SIZES = [
    (name, f) for name in ("llama3", "qwen3") for f in MODEL_SPECS[name].flavors if f[-1] == "B"
]
ONE_GPU = ("debug_model", "llama3_1b", "qwen3_0.6b")
CASES = [
    (config, case)
    for config in DEVICES
    for case in load_cases(config, {})
    if case["benchmark"] == "step" and "train" in case["loops"]
]


@pytest.mark.parametrize(("name", "flavor"), SIZES)
def test_size_trains_in_twelve_bytes_per_parameter(name: str, flavor: str, tmp_path: Path) -> None:
    """Weights and both moments are float32; a step frees its gradients and activations."""
    keys = {
        "model.name": name,
        "model.flavor": flavor,
        "model.vocab_size": "4096",
        "model.args.n_layers": str(LAYERS),
        "training.seq_len": "512",
        "training.local_batch_size": "1",
    }
    (steps,) = train_on_stub(tmp_path, device=LARGE, **keys)
    spec, args = find_model(name, flavor, {"n_layers": LAYERS})
    model = build_on_meta(spec, replace(args, vocab_size=4096), torch.float32)
    n_parameters = sum(p.numel() for p in model.parameters())
    assert steps[3].syncs == steps[4].syncs == {}
    # Besides them cuBLAS's workspaces and buffers.
    assert 0 <= steps[4].allocated - 12 * n_parameters <= 0.1 * GIB
    assert steps[4].peak_allocated >= 16 * n_parameters


@pytest.mark.parametrize("config", ONE_GPU)
def test_committed_configuration_fits_one_gpu(config: str, tmp_path: Path) -> None:
    """``local_batch_size`` of the file, with two microbatches; sharded, it needs less."""
    text = {"training.global_batch_size": "16" if config == "debug_model" else "4"}
    (steps,) = train_on_stub(tmp_path, config=config, device=H100, **GRAPHS, **text)
    assert steps[4].syncs == {}
    assert steps[4].retries == 0


@pytest.mark.parametrize("gib", [4, 6, 12])
def test_what_auto_decides_fits_and_fills_the_gpu(gib: int, tmp_path: Path) -> None:
    """As the launcher does: decide in a process of its own, then train with these values."""
    device = Device("NVIDIA H100", gib * GIB)
    keys = {
        "model.flavor": "1B",
        "model.vocab_size": "4096",
        "model.args.n_layers": "2",
        "training.seq_len": "2048",
        "training.global_batch_size": "32",
    }
    auto = keys | {SIZE: "auto", MODE: "auto"}
    texts = [text for key, value in auto.items() for text in (f"--{key}", value)]
    config = load_config(Path("debug_model"), texts)
    request = {"config": config.model_dump(), "n_ranks": 1, "world_size": 1}
    done = subprocess.run(
        [sys.executable, "-m", "planner.auto"],
        env=os.environ | stub_variables(device, 1),
        input=json.dumps(request),
        capture_output=True,
        check=True,
        text=True,
    )
    values = {key: str(value) for key, value in json.loads(done.stdout)["values"].items()}
    (steps,) = train_on_stub(tmp_path, device=device, **keys, **values)
    assert steps[4].retries == 0
    assert steps[4].peak_allocated <= 0.9 * device.n_bytes
    # The next size of the same mode is twice as large.
    assert values[SIZE] == "32" or steps[4].peak_allocated >= 0.4 * device.n_bytes


@pytest.mark.parametrize(
    ("config", "case"), CASES, ids=[f"{config}-{case['name']}" for config, case in CASES]
)
def test_benchmark_fits_its_gpu(config: str, case: dict[str, Any], tmp_path: Path) -> None:
    """The allocator's peak equals the measured one, if there is one."""
    keys = GRAPHS | keys_of(build_case(case)) | {"training.steps": str(N_STEPS)}
    (steps,) = train_on_stub(tmp_path, device=DEVICES[config], **keys)
    # Statistics of layers are copied to the host in each step that has them.
    assert steps[4].syncs == {} or "metrics.layer_stats_freq" in keys
    assert steps[4].retries == 0
    measured = measured_peak(config, case)
    if measured is not None:
        assert steps[4].peak_reserved / GIB == pytest.approx(measured, rel=0.005)


def measured_peak(config: str, case: dict[str, Any]) -> float | None:
    """GiB of the newest row of ``case``, if this PyTorch and this case were measured."""
    peak, limits = None, {"limit_seconds", "turns", "warmup", "steps_per_turn"}
    lines = (ROOT / f"benchmarks/results/{config}.jsonl").read_text().splitlines()
    for row in map(json.loads, lines):
        is_same = {k: v for k, v in row["settings"].items() if k not in limits} == {
            k: v for k, v in case.items() if k not in limits
        }
        if is_same and row["torch"] == torch.__version__ and row["peak_memory_gib"]:
            peak = row["peak_memory_gib"]
    return peak
