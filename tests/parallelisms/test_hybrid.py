"""Gated DeltaNets see the whole sequence on any mesh, and only their document."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from data.loader import Microbatch
from models import find_model
from models.gated_delta_net import InnerDeltaNet
from parallelisms.materialize import materialize
from tests.lib.layouts import CP, CPU, METHOD, TP, Layout, shard_debugmodel
from tests.lib.ranks import RankPool

GATHER = {METHOD: "allgather"}
SEQ_LEN, SIZES = 160, (37, 1, 66, 24, 32)
# First and last tokens of documents, state chunks and ranks' shards, and some others.
CHANGED = (0, 36, 37, 38, 50, 63, 64, 79, 80, 103, 104, 119, 120, 128, 159)


def check_isolation(layout: Layout) -> None:
    """Assert which logits each changed token changes, and the sequence lengths of layers."""
    args: Any = replace(find_model("qwen3_next", "debugmodel")[1], max_seq_len=SEQ_LEN)
    spec, _ = find_model("qwen3_next", "debugmodel")
    found = shard_debugmodel("qwen3_next", args, layout, dtype="float64")
    materialize(found.module, CPU, seed=7)
    # Slow the decay, so that distant tokens still matter.
    with torch.no_grad():
        for net in spec.delta_nets(found.module):
            cast(Any, net).dt_bias.fill_(-4.0)
    blocks, inners = set(), set()
    for block in spec.blocks(found.module).values():
        block.register_forward_pre_hook(lambda module, inputs: blocks.add(inputs[0].shape[1]))
    for module in found.module.modules():
        if isinstance(module, InnerDeltaNet):
            # Context parallel wraps its forward; what that calls sees whole sequences.
            whole = getattr(getattr(module.forward, "__self__", None), "inner", module)
            whole.register_forward_pre_hook(
                lambda module, inputs: inners.add(tuple(inputs[1].shape[1:4]))
            )

    tokens = torch.randint(
        args.vocab_size, (1, SEQ_LEN), generator=torch.Generator().manual_seed(1)
    )
    ids = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))[None]
    positions = torch.cat([torch.arange(size) for size in SIZES])[None]
    rows = tokens.repeat(1 + len(CHANGED), 1)
    for row, at in enumerate(CHANGED, start=1):
        rows[row, at] = (rows[row, at] + 1) % args.vocab_size
    batch = Microbatch(rows, rows, positions.expand_as(rows), ids.expand_as(rows))
    before, *changed = found.runner().logits(batch)
    for at, logits in zip(CHANGED, changed, strict=True):
        differences = (logits - before).abs().amax(dim=-1)
        sees = (ids[0] == ids[0, at]) & (torch.arange(SEQ_LEN) >= at)
        # A matmul of other sizes rounds differently.
        assert differences[~sees].sum() < 1e-11, f"position {at} is seen by others"
        assert differences[sees].min() > 1e-9, f"position {at} is not seen by all of its document"

    cp, tp = found.dims.degrees.cp, found.dims.degrees.tp
    assert blocks == {SEQ_LEN // (cp * tp)}
    heads = args.n_value_heads // (cp * tp)
    assert {(seq_len, n * ratio) for seq_len, n, ratio in inners} == {(SEQ_LEN, heads)}


@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, {CP: 2}),
        Layout(2, {CP: 2} | GATHER),
        Layout(4, {CP: 4}),
        Layout(4, {CP: 2, TP: 2} | GATHER),
    ],
    ids=str,
)
def test_sequences_are_sharded_and_documents_isolated(ranks: RankPool, layout: Layout) -> None:
    ranks.run(check_isolation, layout.world_size, layout)
