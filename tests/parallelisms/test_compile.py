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


class Kind(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def test_layers_of_many_kinds_train_validate_and_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    # PyTorch's default, to which it returns.
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 8)
    blocks = nn.ModuleDict({str(index): Kind(index + 0.5) for index in range(3)})
    config = Compile(enable=True, backend="eager")
    options = {"recomputes": False, "buckets_collectives": False, "splits_matmuls": False}
    apply_compile(blocks, config=config, regions={}, **options)
    for rows, is_training in ((4, True), (4, False), (2, False), (1, False)):
        blocks.train(is_training)
        with torch.set_grad_enabled(is_training):
            for block in blocks.values():
                x = torch.ones(rows, 3)
                assert torch.equal(block(x), x * block.factor)
