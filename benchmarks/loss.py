"""Cross entropy compared with PyTorch's: peak memory above the logits, forward-backward time."""

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
from runtime.labels import IGNORE_INDEX


class Case(Section):
    tokens: Count
    vocab_size: Count
    turns: Count
    limit_seconds: Count = 300


def run(case: Case) -> Iterator[Row]:
    """Yield a row per implementation."""
    deadline = time.monotonic() + case.limit_seconds
    compiled = partial(cross_entropy_sum, compile=Compile(enable=True))
    losses = {"PyTorch's": pytorch_loss, "ours": cross_entropy_sum, "ours, compiled": compiled}
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


def pytorch_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum the cross entropy of float32 logits (b, s, vocab) over labels (b, s)."""
    flat = logits.float().flatten(0, 1)
    return F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def loss_loop(turns: Turns, case: Case, loss: Callable[..., torch.Tensor]) -> None:
    """Run forward and backward of ``loss`` on random logits in each turn."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = (1, case.tokens, case.vocab_size)
    logits = torch.randn(shape, device=device, dtype=torch.bfloat16)
    labels = torch.randint(case.vocab_size, shape[:2], device=device)
    while True:
        # Not a leaf, like the logits of a model.
        non_leaf = logits.requires_grad_() * 1
        turns.note = peak_memory_gib(device)
        turns.next_step()
        loss(non_leaf, labels).backward()
        logits.grad = None
        del non_leaf
