"""The loss beside PyTorch's: peak memory above the logits, and time, forward and backward."""

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.rows import Row
from benchmarks.turns import Loop, Turns
from config.job_config import Compile, Count, Section
from metrics.logger import peak_memory_gib
from optim.loss import cross_entropy_sum
from runtime.labels import IGNORED


class Case(Section):
    tokens: Count
    vocab_size: Count
    turns: Count
    limit_seconds: Count = 300


def run(case: Case) -> Iterator[Row]:
    deadline = time.monotonic() + case.limit_seconds
    compiled = partial(cross_entropy_sum, compile=Compile(enable=True))
    losses = {"PyTorch's": of_pytorch, "ours": cross_entropy_sum, "ours, compiled": compiled}
    for what, loss in losses.items():
        with Loop(loss_loop, case, loss, deadline=deadline) as loop:
            turns = [loop.turn() for _ in range(case.turns)]
        yield {
            "what": what,
            "seconds": min(turn.seconds for turn in turns),
            "cpu_seconds": min(turn.cpu_seconds for turn in turns),
            "gib_above_logits": turns[-1].peak_gib - loop.ready,
            "tokens_per_second": case.tokens / min(turn.seconds for turn in turns),
        }


def of_pytorch(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    flat = logits.float().flatten(0, 1)
    return F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, reduction="sum")


def loss_loop(turns: Turns, case: Case, loss: Callable[..., torch.Tensor]) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = (1, case.tokens, case.vocab_size)
    logits = torch.randn(shape, device=device, dtype=torch.bfloat16)
    labels = torch.randint(case.vocab_size, shape[:2], device=device)
    while True:
        # Not a leaf, like the logits that a model computes.
        made = logits.requires_grad_() * 1
        turns.note = peak_memory_gib(device)
        turns.next_step()
        loss(made, labels).backward()
        logits.grad = None
        del made
