"""Host time of a step by size: ``PYTHON -m tests.gpu_without_gpu.host_time [SIZE ...]``

Trains 4 sequences of 2,048 tokens on the stub, whose kernels take no time, with the interpreter
that ``./run_tests.sh --gpu-stub`` has made. Prints CPU milliseconds and launches per step.
"""

import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from build_model import training_flops
from models import find_model
from models.meta import build_on_meta
from tests.gpu_without_gpu.stub_run import GRAPHS, Step, train_on_stub

SIZES = ("llama3 124M", "llama3 350M", "qwen3 0.6B", "llama3 1B", "llama3 3B")
COMPILED = {"compile.enable": "true"}
MODES = {
    "eager": {},
    "eager, graphs": GRAPHS,
    "compiled": COMPILED,
    "compiled, graphs": COMPILED | GRAPHS,
}
BATCH, SEQ_LEN, VOCABULARY, N_STEPS = 4, 2048, 50304, 12
# After the steps that compile and record, and before the last, which is logged.
QUIET = slice(4, N_STEPS)
# Half of an H100's.
FLOPS_PER_SECOND = 0.5 * 989e12


def main(sizes: list[str]) -> None:
    print("| size | GPU, ms | " + " | ".join(MODES) + " |")
    print("|---|---:|" + "---:|" * len(MODES))
    for size in sizes or SIZES:
        found = [measured(quiet_steps(size, keys)) for keys in MODES.values()]
        print(f"| {size} | {gpu_milliseconds(size):.0f} | {' | '.join(found)} |", flush=True)


def quiet_steps(size: str, keys: dict[str, str]) -> list[Step]:
    name, flavor = size.split()
    own = {
        "model.name": name,
        "model.flavor": flavor,
        "model.vocab_size": str(VOCABULARY),
        "training.seq_len": str(SEQ_LEN),
        "training.local_batch_size": str(BATCH),
        "training.steps": str(N_STEPS),
        "activation_checkpoint.mode": "none",
    }
    with tempfile.TemporaryDirectory() as folder:
        (steps,) = train_on_stub(Path(folder), **own, **keys)
    return steps[QUIET]


def measured(steps: list[Step]) -> str:
    milliseconds = 1e3 * statistics.median(step.cpu_seconds for step in steps)
    launches = sum(steps[0].count(kind) for kind in ("kernel", "gemm", "graph"))
    return f"{milliseconds:.1f} ms, {launches:,}"


def gpu_milliseconds(size: str) -> float:
    """Time of the step's FLOPs, with causal attention, at half of an H100's peak."""
    name, flavor = size.split()
    spec, args = find_model(name, flavor)
    args = replace(args, vocab_size=VOCABULARY)
    module = build_on_meta(spec, args, torch.bfloat16)
    _, flops = training_flops(spec, args, module, SEQ_LEN)
    return 1e3 * flops * BATCH * SEQ_LEN / FLOPS_PER_SECOND


if __name__ == "__main__":
    main(sys.argv[1:])
