"""Troubles that a user's own model, data and schedule may bring into a run, by module:attribute."""

import os
import signal
import time
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn

from models.llama3 import SPEC
from models.transformer import Transformer, TransformerArgs, TransformerBlock

LAST_STEP = 56
"""Rank 1 leaves the others alone in it."""
LEAKED_BYTES = 8 << 20
# Of the data source: after the 128 that recognize it, and 64 for their lengths.
SLOW_READ, SLOW_SECONDS = 230, 3.0
SAVE_SECONDS = 6.0
# Of the time until then: what is reported is a share of it, and steps of a slow machine take long.
SLOW_SHARE, SAVE_SHARE = 0.3, 0.25


@torch.compile(backend="eager", dynamic=False)
def ones_like(x: torch.Tensor) -> torch.Tensor:
    return x.cos() ** 2 + x.sin() ** 2


class SlowBlock(TransformerBlock):
    """Takes longer on rank 1."""

    def forward(
        self, x: torch.Tensor, rope: torch.Tensor, document_ids: torch.Tensor | None
    ) -> torch.Tensor:
        if os.environ["RANK"] == "1":
            time.sleep(0.05)
        return super().forward(x, rope, document_ids)


class Troubled(Transformer):
    """Slow on rank 1 and to save; keeps memory; a compiled part never sees a shape twice."""

    def __init__(self, args: TransformerArgs) -> None:
        super().__init__(args)
        self.step, self.begin = 0, time.monotonic()
        self.kept: list[torch.Tensor] = []

    def build_block(self, index: int) -> nn.Module:
        return SlowBlock(self.args) if index == 0 else super().build_block(index)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Take long, as a slow file system does."""
        time.sleep(max(SAVE_SECONDS, SAVE_SHARE * (time.monotonic() - self.begin)))
        return super().state_dict(*args, **kwargs)

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self.training and torch.is_grad_enabled():
            self.step += 1
            self.kept.append(torch.ones(LEAKED_BYTES, dtype=torch.uint8))
            ones_like(torch.ones(self.step))
            # Also after the launcher's signals.
            while self.step == LAST_STEP and os.environ["RANK"] == "1":
                signal.pause()
        return super().forward(x, positions, document_ids)


TROUBLED = replace(SPEC, model_cls=Troubled)


class SlowTexts:
    """One read takes long: a disk that is busy, or a far server."""

    def __init__(self) -> None:
        self.n_reads, self.begin = 0, time.monotonic()

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> str:
        self.n_reads += 1
        if self.n_reads == SLOW_READ:
            time.sleep(max(SLOW_SECONDS, SLOW_SHARE * (time.monotonic() - self.begin)))
        return f"{index} and {index} are {2 * index}, as everyone knows\n"

    def fingerprint(self) -> str:
        return "texts"


def too_high(step: int, total_steps: int, warmup_steps: int) -> float:
    """Factor on the learning rate: of a usual warmup, and then far too high."""
    return min(1.0, step / warmup_steps) if step < 16 else 300.0
