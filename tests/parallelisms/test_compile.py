"""Options of the compiler hold in backward too, which on GPUs a thread of autograd compiles."""

import threading
import time
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch._inductor import compile_fx, config

from config.job_config import Compile
from parallelisms.compile import apply_compile


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Never the same graph, so that none comes from a cache.
        self.factor = time.time()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos() * self.factor


def test_options_hold_in_a_backward_that_another_thread_compiles(monkeypatch: pytest.MonkeyPatch):
    seen, compile_inner = {}, compile_fx._compile_fx_inner

    def record(*args: Any, **kwargs: Any) -> Any:
        name = "backward" if kwargs.get("is_backward") else "forward"
        seen[name] = config._micro_pipeline_tp, config.bucket_all_gathers_fx
        return compile_inner(*args, **kwargs)

    monkeypatch.setattr(compile_fx, "_compile_fx_inner", record)
    blocks = nn.ModuleDict({"0": Block()})
    apply_compile(
        blocks,
        config=Compile(enable=True),
        regions={},
        recomputes=False,
        buckets_collectives=True,
        splits_matmuls=True,
    )
    total = blocks["0"](torch.ones(3, requires_grad=True)).sum()
    thread = threading.Thread(target=total.backward)
    thread.start()
    thread.join()
    assert seen == {"forward": (True, "all"), "backward": (True, "all")}
