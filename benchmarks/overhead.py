"""What ``train.py`` costs beside a bare loop: ``python -m benchmarks.overhead``

One model shape, one batch, one dtype; two processes that take turns step by step, so that whatever
else the machine does slows both. The ratio is of the median steps. Start-up is measured from
``run_train.sh`` to the end of the first step.
"""

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

import train
from config import load_config
from data.loader import Batch, BatchLoader
from job import resolve
from metrics.logger import peak_memory_gib
from models.transformer import Transformer, TransformerArgs
from runtime.post_mortem import Witness

ROOT = Path(__file__).parents[1]
ARGS = TransformerArgs(
    dim=512, n_layers=8, n_heads=8, n_kv_heads=4, head_dim=64, hidden_dim=1536, vocab_size=4096,
    max_seq_len=512,
)  # fmt: skip
BATCH_SIZE = 4
STEPS, WARMUP_STEPS = 40, 5


class Step(NamedTuple):
    seconds: float
    cpu_seconds: float
    peak_gib: float


class Clock:
    def __init__(self) -> None:
        self._begin, self._cpu_begin = time.perf_counter(), time.process_time()

    def stop(self) -> Step:
        seconds, cpu = time.perf_counter() - self._begin, time.process_time() - self._cpu_begin
        return Step(seconds, cpu, peak_memory_gib(torch.device("cpu")))


def bare_loop(turns: Connection) -> None:
    """The same model with nothing around it; a step for every item received."""
    model = Transformer(ARGS)
    model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    tokens = torch.randint(256, (BATCH_SIZE, ARGS.max_seq_len + 1))
    while turns.recv():
        clock = Clock()
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        turns.send(clock.stop())


def train_beside(turns: Connection) -> tuple[list[Step], list[Step]]:
    """The steps of ``train.py``, which lets the bare loop make one before each of its own."""
    ours: list[Step] = []
    theirs: list[Step] = []
    clocks: list[Clock] = []

    class PatientLoader(BatchLoader):
        def __next__(self) -> Batch:
            ours.extend(clock.stop() for clock in clocks)
            turns.send(True)
            theirs.append(turns.recv())
            clocks[:] = [Clock()]
            return super().__next__()

    overrides = {
        "job.output_dir": tempfile.mkdtemp(),
        "model.vocab_size": str(ARGS.vocab_size),
        "training.steps": str(STEPS),
        "training.seq_len": str(ARGS.max_seq_len),
        "training.local_batch_size": str(BATCH_SIZE),
        "training.mixed_precision_param": "float32",
        "activation_checkpoint.mode": "none",
        "checkpoint.enable": "false",
        "validation.enable": "false",
        "validation.sample_tokens": "0",
    }
    arguments = [part for key, value in overrides.items() for part in (f"--{key}", value)]
    config = load_config(ROOT / "train_configs/debug_model.toml", arguments)
    train.BatchLoader = PatientLoader  # type: ignore[misc]
    train.main(replace(resolve(config, world_size=1), args=ARGS), Witness({}))
    turns.send(False)
    return ours[WARMUP_STEPS:], theirs[WARMUP_STEPS:]


def startup_seconds() -> float:
    """From ./run_train.sh on one rank to the end of its first step."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        [ROOT / "run_train.sh", "--training.steps", "1", "--job.output_dir", tempfile.mkdtemp()],
        env=os.environ | {"NGPU": "1", "PYTHON": sys.executable, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    while "step     1  loss" not in process.stdout.readline():
        assert process.poll() is None, "the run failed"
    seconds = time.perf_counter() - begin
    process.communicate()
    return seconds


def main() -> None:
    here, there = get_context("spawn").Pipe()
    get_context("spawn").Process(target=bare_loop, args=(there,), daemon=True).start()
    ours, theirs = train_beside(here)
    tokens = BATCH_SIZE * ARGS.max_seq_len
    print(f"{os.cpu_count()} CPUs, torch {torch.__version__}, Python {platform.python_version()}")
    for name, steps in (("train.py", ours), ("bare loop", theirs)):
        rate = tokens / statistics.median(step.seconds for step in steps)
        print(f"{name:9}  {rate:,.0f} tokens/s  {steps[-1].peak_gib:.2f} GiB")
    for what in ("seconds", "cpu_seconds"):
        medians = [statistics.median(getattr(s, what) for s in steps) for steps in (theirs, ours)]
        print(f"ratio by {what.replace('_', ' ')}  {medians[0] / medians[1]:.3f}")
    print(f"start to end of first step  {min(startup_seconds() for _ in range(3)):.1f} s")


if __name__ == "__main__":
    main()
