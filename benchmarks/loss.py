"""The loss beside PyTorch's, of Llama 3's vocabulary: ``python -m benchmarks.loss [TOKENS]``

Peak memory above the bfloat16 logits, and time, forward and backward; each in its own process.
"""

import platform
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context

import torch
import torch.nn.functional as F

from metrics.logger import peak_memory_gib
from optim.loss import cross_entropy_sum
from runtime.labels import IGNORED

VOCAB_SIZE, TOKENS, TURNS = 128256, 4096, 3

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def of_pytorch(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    flat = logits.float().flatten(0, 1)
    return F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, reduction="sum")


def measure(loss: Loss, n_tokens: int) -> tuple[float, float]:
    """GiB above the logits, and seconds of the fastest turn."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    logits = torch.randn(1, n_tokens, VOCAB_SIZE, device=device, dtype=torch.bfloat16)
    labels = torch.randint(VOCAB_SIZE, (1, n_tokens), device=device)
    seconds = []
    before = 0.0
    for _ in range(TURNS):
        # As what a model makes, which is not a leaf.
        made = logits.requires_grad_() * 1
        before = before or peak_memory_gib(device)
        begin = time.perf_counter()
        loss(made, labels).backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
        logits.grad = None
    return peak_memory_gib(device) - before, min(seconds)


def main(n_tokens: int) -> None:
    for name, loss in (("PyTorch's", of_pytorch), ("ours", cross_entropy_sum)):
        with get_context("spawn").Pool(1) as pool:
            gib, seconds = pool.apply(measure, (loss, n_tokens))
        print(f"{name:9}  {gib:6.2f} GiB above the logits  {seconds:6.2f} s", flush=True)
    print(f"{n_tokens} tokens, torch {torch.__version__}, Python {platform.python_version()}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else TOKENS)
