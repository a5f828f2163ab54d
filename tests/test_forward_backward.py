"""Pipeline runners keep no logits after an evaluation and one training schedule."""

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

from data.loader import Microbatch, num_target_tokens
from models import find_model
from parallelisms.materialize import materialize
from tests.lib.layouts import CPU, PP, SCHEDULE, Layout, shard_debugmodel
from tests.lib.ranks import RankPool

ROWS, SEQ_LEN, N_BATCHES = 2, 16, 5


def count_live_objects(layout: Layout) -> tuple[int, int]:
    """Count live logits after an evaluation, and schedules after two batch sizes."""
    args = replace(find_model("llama3", "debugmodel")[1], n_layers=4, max_seq_len=SEQ_LEN)
    sharded = shard_debugmodel("llama3", args, layout)
    materialize(sharded.module, CPU, seed=7)
    runner: Any = sharded.runner()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(args.vocab_size, (N_BATCHES, ROWS, SEQ_LEN), generator=generator)
    batches = [Microbatch(part, part) for part in tokens]
    size = ROWS * SEQ_LEN * args.vocab_size
    losses = runner.evaluate(batches)
    assert losses.shape == (N_BATCHES,)
    gc.collect()
    n_logits = sum(torch.is_tensor(each) and each.numel() == size for each in gc.get_objects())
    for microbatches in (batches[:2], batches[:4], batches[:4]):
        runner.forward_backward(microbatches, num_target_tokens(microbatches))
    return n_logits, len(runner._training)


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_pipeline_keeps_no_logits_and_one_schedule(ranks: RankPool, schedule: str) -> None:
    assert ranks.run(count_live_objects, 2, Layout(2, {PP: 2, SCHEDULE: schedule})) == [(0, 1)] * 2


def modes_of_blocks(layout: Layout) -> list[list[bool]]:
    """Training modes of two blocks in an evaluation, a sample, and afterwards."""
    args = replace(find_model("llama3", "debugmodel")[1], n_layers=2, max_seq_len=SEQ_LEN)
    sharded = shard_debugmodel("llama3", args, layout)
    materialize(sharded.module, CPU, seed=7)
    blocks = list(sharded.spec.blocks(sharded.module).values())
    blocks[-1].eval()
    modes: list[list[bool]] = []
    blocks[0].register_forward_pre_hook(lambda *_: modes.append([b.training for b in blocks]))
    tokens = torch.zeros(1, SEQ_LEN, dtype=torch.int64)
    runner = sharded.runner()
    runner.evaluate([Microbatch(tokens, tokens)])
    runner.logits(Microbatch(tokens, tokens))
    return [*modes, [block.training for block in blocks]]


def test_validation_and_samples_run_in_eval_mode(ranks: RankPool) -> None:
    """A part that its model keeps in eval mode stays there."""
    found = ranks.run(modes_of_blocks, 2, Layout(2))
    assert found == [[[False, False], [False, False], [True, False]]] * 2
