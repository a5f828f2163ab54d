"""What ``train.py`` costs beside a bare loop: ``python -m benchmarks.overhead``

One process, one model shape, one dtype. The two loops take turns of a few steps, so that whatever
else the machine does slows both; the ratio is of the median turns. Peak memory is measured in
processes of their own, and start-up from ``run_train.sh`` to the end of the first step.
"""

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

import train
from config import load_config
from data.loader import Batch, BatchLoader
from metrics.logger import peak_memory_gib
from models.transformer import Transformer, TransformerArgs

ROOT = Path(__file__).parents[1]
ARGS = TransformerArgs(
    dim=512, n_layers=8, n_heads=8, n_kv_heads=4, head_dim=64, hidden_dim=1536, vocab_size=4096,
    max_seq_len=512,
)  # fmt: skip
BATCH_SIZE = 4
TURN_STEPS, TURNS = 3, 12
WARMUP_TURNS = 2


class Turns:
    """Lets one of two loops run at a time, and keeps the seconds of each turn."""

    def __init__(self, names: list[str]) -> None:
        self._gates = {name: threading.Semaphore(0) for name in names}
        self._next = dict(zip(names, names[1:] + names[:1], strict=True))
        self.seconds: dict[str, list[float]] = {name: [] for name in names}
        self._gates[names[0]].release()

    def steps(self, name: str) -> Iterator[None]:
        """One item a step; whoever iterates waits here for its turn."""
        for _ in range(TURNS):
            self._gates[name].acquire()
            begin = time.perf_counter()
            for _ in range(TURN_STEPS):
                yield
            self.seconds[name].append(time.perf_counter() - begin)
            self._gates[self._next[name]].release()


def bare_loop(turns: Turns) -> None:
    """The same model with nothing around it."""
    model = Transformer(ARGS)
    model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    tokens = torch.randint(256, (BATCH_SIZE, ARGS.max_seq_len + 1))
    for _ in turns.steps("bare"):
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def train_loop(turns: Turns) -> None:
    """``train.py`` itself, which takes its batches only in its turns."""
    steps = turns.steps("train")

    class PatientLoader(BatchLoader):
        def __next__(self) -> Batch:
            next(steps)
            return super().__next__()

    overrides = {
        "job.output_dir": tempfile.mkdtemp(),
        "model.vocab_size": str(ARGS.vocab_size),
        "training.steps": str(TURNS * TURN_STEPS),
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
    train.BatchLoader = PatientLoader
    train.main(replace(train.resolve(config, world_size=1), args=ARGS))
    next(steps, None)


def compare() -> None:
    turns = Turns(["train", "bare"])
    bare = threading.Thread(target=bare_loop, args=(turns,), daemon=True)
    bare.start()
    train_loop(turns)
    bare.join()
    tokens = TURN_STEPS * BATCH_SIZE * ARGS.max_seq_len
    rates = {
        name: tokens / statistics.median(s[WARMUP_TURNS:]) for name, s in turns.seconds.items()
    }
    machine = (
        f"{os.cpu_count()} CPUs, torch {torch.__version__}, Python {platform.python_version()}"
    )
    print(f"{machine}, {torch.get_num_threads()} threads")
    print(f"train.py {rates['train']:,.0f} tokens/s, bare loop {rates['bare']:,.0f} tokens/s")
    print(f"ratio {rates['train'] / rates['bare']:.3f}")


def peak_memory(name: str) -> float:
    """GiB of a process that runs one of the loops alone."""
    command = [sys.executable, "-m", "benchmarks.overhead", name]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return float(output.splitlines()[-1])


def startup() -> float:
    """Seconds from ./run_train.sh on one rank to the end of its first step, files warm."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        [ROOT / "run_train.sh", "--training.steps", "1", "--job.output_dir", tempfile.mkdtemp()],
        env=os.environ | {"NGPU": "1", "PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "step     1  loss" in line:
            seconds = time.perf_counter() - begin
    process.wait()
    return seconds


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["train" | "bare" as alone]:
            {"train": train_loop, "bare": bare_loop}[alone](Turns([alone]))
            print(peak_memory_gib(torch.device("cpu")))
        case _:
            compare()
            memory = {name: peak_memory(name) for name in ("train", "bare")}
            print(f"peak memory {memory['train']:.2f} GiB, bare loop {memory['bare']:.2f} GiB")
            print(f"start to end of first step {min(startup() for _ in range(3)):.1f} s")
